"""How long a step of a run takes under any setting, drawn from the steps of probes. Loads no torch.

A micro-batch of m sequences takes a + b·m seconds. A step takes as many of them as it has, the pipeline's bubble on
top, and a part that comes but once, whatever its micro-batches: the optimizer's, above all where that works in host
memory. A probe's step may have fewer micro-batches than the run's, and so that part must be told from the rest.
"""

from collections.abc import Sequence
from itertools import pairwise

from megabench.config import ResolvedConfig
from megabench.config.auto import Setting
from megabench.record import Probe

# compute of a micro-batch whose layers run forward twice, to that of one whose layers do once
_COMPUTE = {"none": 1.0, "selective": 1.0, "full": 4 / 3}
_LIKELY = 2 / 3  # of the most that may come but once, where nothing else tells: what served best over many machines
_DETERMINED = 1e-9  # of the largest determinant that the probes could have: less is rounding


class StepModel:
    """The run's step as `good`, probes that fit, show it.

    `most_once` are the most seconds that the part that comes but once can take, if a larger micro-batch takes no less
    than a smaller one; `likely_once` are those of the least squares, where the probes tell them, else a share of that.
    """

    def __init__(self, run: ResolvedConfig, good: Sequence[Probe]) -> None:
        self._replicas = run.layout.data_parallel
        self._sequences = run.global_batch // self._replicas
        self._bubble = (run.pp - 1) / run.vp  # micro-batches' time that a stage waits in a step
        self._good = sorted(good, key=_compute)
        self.most_once = self._most_once()
        fitted = _constant([(self._rounds(probe), _compute(probe), _seconds(probe)) for probe in good])
        self.likely_once = self.most_once * _LIKELY if fitted is None else min(max(0.0, fitted), self.most_once)

    def measured(self, probe: Probe, once: float) -> float:
        """Seconds of the run's step under the setting of a probe, of which the part `once` comes but once."""
        return once + (self._sequences / probe.micro_batch + self._bubble) * self._micro_batch_seconds(probe, once)

    def fastest(self, once: float) -> float:
        """Seconds of the run's step under the fastest of the settings that were tried."""
        return min(self.measured(probe, once) for probe in self._good)

    def predicted(self, setting: Setting, once: float) -> float:
        """Seconds of the run's step under a setting that was not tried, where two were."""
        same = [probe for probe in self._good if probe.recompute == setting.recompute]
        known = same if len(same) > 1 else self._good
        points = list({_compute(probe): self._micro_batch_seconds(probe, once) for probe in known}.items())[-2:]
        one, (largest, its) = line(_compute(setting), points), points[-1]
        if _compute(setting) > largest:
            one = max(one, its)  # a larger micro-batch cannot be faster in total, so the difference is noise
        return once + (self._sequences / setting.micro_batch + self._bubble) * one

    def _micro_batch_seconds(self, probe: Probe, once: float) -> float:
        return (_seconds(probe) - once) / self._rounds(probe)

    def _rounds(self, probe: Probe) -> float:
        """Micro-batches' time in a step of a probe."""
        return probe.global_batch / self._replicas / probe.micro_batch + self._bubble

    def _most_once(self) -> float:
        most = min(map(_seconds, self._good), default=0.0)
        for small, large in pairwise(self._good):
            if (more := self._rounds(small)) > (fewer := self._rounds(large)):
                most = min(most, (more * _seconds(large) - fewer * _seconds(small)) / (more - fewer))
        return max(0.0, most)


def line(x: float, points: Sequence[tuple[float, float]]) -> float:
    """The value at `x` of the straight line through two points."""
    (x1, y1), (x2, y2) = points
    return y1 + (y2 - y1) / (x2 - x1) * (x - x1)


def _compute(of: Probe | Setting) -> float:
    """Sequences of a micro-batch, counted by their compute."""
    return _COMPUTE[of.recompute] * of.micro_batch


def _seconds(probe: Probe) -> float:
    assert probe.step_seconds is not None
    return probe.step_seconds


def _constant(steps: Sequence[tuple[float, float, float]]) -> float | None:
    """u, where steps of n micro-batches of m sequences took u + n·(a + b·m) seconds; each is (n, m, seconds).

    By the smallest sum of squares of the relative errors; None where the steps do not determine it.
    """
    rows = [(1 / seconds, n / seconds, n * m / seconds) for n, m, seconds in steps]
    squares = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    sums = [sum(row[i] for row in rows) for i in range(3)]
    whole = _determinant(squares)
    if whole <= _DETERMINED * squares[0][0] * squares[1][1] * squares[2][2]:
        return None
    return _determinant([[sums[i], *squares[i][1:]] for i in range(3)]) / whole


def _determinant(rows: Sequence[Sequence[float]]) -> float:
    """Of three rows of three."""
    (a, b, c), (d, e, f), (g, h, i) = rows
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
