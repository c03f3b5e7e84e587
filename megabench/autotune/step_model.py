"""Predict the step time of a run under any setting from the step times of short runs. Loads no torch.

A micro-batch of m sequences takes a + b·m seconds. A step consists of its micro-batches, the pipeline bubble, and a
fixed part such as the optimizer, which is long with offload. A short run may have fewer micro-batches per step than the
full run, so the model must separate the fixed part.
"""

from collections.abc import Sequence
from itertools import pairwise

from megabench.config import ResolvedConfig
from megabench.config.auto import AutoSetting
from megabench.record import Probe

# compute time of a micro-batch relative to one without recomputation
_COMPUTE = {"none": 1.0, "selective": 1.0, "full": 4 / 3}
# The fixed part of a step is assumed to be this fraction of its upper bound, which predicted step times best on many
# machines.
_LIKELY = 2 / 3
_DETERMINED = 1e-9  # smallest determinant, as a fraction of the largest possible one, that is not rounding error


class StepModel:
    """Step-time model of a run, fitted to `good`, the short runs that fit into memory.

    `most_once` is an upper bound of the fixed part in seconds, if larger micro-batches do not take less time;
    `likely_once` is the least-squares estimate of the fixed part, or a share of the bound if the runs do not determine
    it.
    """

    def __init__(self, run: ResolvedConfig, good: Sequence[Probe]) -> None:
        self._replicas = run.layout.data_parallel
        self._sequences = run.global_batch // self._replicas
        self._bubble = (run.pp - 1) / run.vp  # pipeline bubble of a step, in micro-batches
        self._good = sorted(good, key=_compute)
        self.most_once = self._most_once()
        fitted = _constant([(self._rounds(probe), _compute(probe), _seconds(probe)) for probe in good])
        self.likely_once = self.most_once * _LIKELY if fitted is None else min(max(0.0, fitted), self.most_once)

    def measured(self, probe: Probe, once: float) -> float:
        """Return the seconds of the run's step under the setting of a short run, given the fixed part `once`."""
        return once + (self._sequences / probe.micro_batch + self._bubble) * self._micro_batch_seconds(probe, once)

    def fastest(self, once: float) -> float:
        """Return the seconds of the run's step under the fastest measured setting."""
        return min(self.measured(probe, once) for probe in self._good)

    def predicted(self, setting: AutoSetting, once: float) -> float:
        """Return the predicted seconds of the run's step under a setting that was not measured.

        Needs two measurements.
        """
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
        """Return the number of micro-batches in a short run's step, including the pipeline bubble."""
        return probe.global_batch / self._replicas / probe.micro_batch + self._bubble

    def _most_once(self) -> float:
        most = min(map(_seconds, self._good), default=0.0)
        for small, large in pairwise(self._good):
            if (more := self._rounds(small)) > (fewer := self._rounds(large)):
                most = min(most, (more * _seconds(large) - fewer * _seconds(small)) / (more - fewer))
        return max(0.0, most)


def line(x: float, points: Sequence[tuple[float, float]]) -> float:
    """Return the value at `x` of the straight line through two points."""
    (x1, y1), (x2, y2) = points
    return y1 + (y2 - y1) / (x2 - x1) * (x - x1)


def _compute(of: Probe | AutoSetting) -> float:
    """Return the compute of a micro-batch, in sequences without recomputation."""
    return _COMPUTE[of.recompute] * of.micro_batch


def _seconds(probe: Probe) -> float:
    assert probe.step_seconds is not None
    return probe.step_seconds


def _constant(steps: Sequence[tuple[float, float, float]]) -> float | None:
    """Return u of the model u + n·(a + b·m) seconds for a step of n micro-batches of m sequences.

    Each of `steps` is (n, m, seconds). The fit minimizes the sum of squared relative errors. Return None if the steps
    do not determine u.
    """
    rows = [(1 / seconds, n / seconds, n * m / seconds) for n, m, seconds in steps]
    squares = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    sums = [sum(row[i] for row in rows) for i in range(3)]
    whole = _determinant(squares)
    if whole <= _DETERMINED * squares[0][0] * squares[1][1] * squares[2][2]:
        return None
    return _determinant([[sums[i], *squares[i][1:]] for i in range(3)]) / whole


def _determinant(rows: Sequence[Sequence[float]]) -> float:
    """Return the determinant of a 3 × 3 matrix."""
    (a, b, c), (d, e, f), (g, h, i) = rows
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
