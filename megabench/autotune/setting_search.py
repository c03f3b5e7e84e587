"""Choose the micro-batch and recomputation of the next short run, to find the fastest setting that fits.

Loads no torch. Two models, fitted to the results so far, choose the next short run. Memory grows linearly with the
micro-batch, and step_model.py predicts the step time. The final choice is always the fastest measured setting.
"""

from collections.abc import Sequence

from megabench.autotune.step_model import StepModel, line
from megabench.config import ResolvedConfig
from megabench.config.auto import AutoSetting
from megabench.record import Probe

MOST_PROBES = 4  # maximum number of short runs that fit into memory, and of short runs per recomputation level
MOST_PROBES_BESIDE = 3  # maximum number of short runs of a level with more recomputation than a level that fits

_LEAST_GAIN = 0.003  # smaller gains are measurement noise, even on one GPU
# A short run is made for a predicted gain of this size, even if only the largest estimate of a step's fixed time
# predicts the gain.
_HOPED_GAIN = 0.1

# With recomputation, a micro-batch is measured if it is at most this many times as large as one that fits without …
_LESS_MEMORY = {"selective": 4 / 3, "full": 4}
_DOUBLE = 2  # … and at most twice as large as a measured one, until two results determine the memory per sequence.


class Search:
    """The search for one run: `next` returns the setting to measure, and `best` is the fastest setting so far."""

    def __init__(self, settings: Sequence[AutoSetting], run: ResolvedConfig) -> None:
        """`settings` are the settings to choose from, and `run` is resolved with any of them."""
        self.probes: list[Probe] = []
        self._run = run
        self._device_gib: float | None = None
        self._sizes: dict[str, list[int]] = {}
        for setting in settings:
            self._sizes.setdefault(setting.recompute, []).append(setting.micro_batch)

    @property
    def most_probes(self) -> int:
        """The maximum number of short runs: one of each level that does not fit, and several of the other levels."""
        most = [min(len(sizes), MOST_PROBES_BESIDE) for sizes in self._sizes.values()]
        return max(
            num_failed + min(len(sizes), MOST_PROBES) + sum(most[num_failed + 1 :])
            for num_failed, sizes in enumerate(self._sizes.values())
        )

    def tell(self, probe: Probe, device_gib: float | None) -> None:
        """Record the result of a short run on devices with `device_gib` of memory."""
        self.probes.append(probe)
        self._device_gib = device_gib or self._device_gib

    @property
    def best(self) -> AutoSetting | None:
        """The fastest measured setting.

        Among equally fast settings, the one with the least memory. None if no setting fits.
        """
        good = self._good()
        if not good:
            return None
        model = StepModel(self._run, good)
        enough = model.fastest(model.likely_once) * (1 + _LEAST_GAIN)
        as_fast = [probe for probe in good if model.measured(probe, model.likely_once) <= enough]
        chosen = min(as_fast, key=lambda probe: probe.peak_memory_gib or 0.0)
        return AutoSetting(chosen.micro_batch, chosen.recompute)

    def next(self) -> AutoSetting | None:
        """Return the setting to measure next, or None if no setting is predicted to be faster.

        The search measures the two smallest micro-batches of the first recomputation level that fits. Then it measures
        the settings that the models recommend. Larger micro-batches with more recomputation can be faster if each
        micro-batch has a high fixed cost, such as gathering weights over a slow network.
        """
        if len(self._good()) == MOST_PROBES:
            return None
        for level, (smallest, *larger) in self._sizes.items():
            tried = self._tried(level)
            if smallest not in tried:
                return AutoSetting(smallest, level)
            if self._good(level):
                return AutoSetting(larger[0], level) if larger and larger[0] not in tried else self._promising(level)
        return None

    def _promising(self, level: str) -> AutoSetting | None:
        """Return a setting that is predicted to be faster than all measured settings."""
        levels = list(self._sizes)
        beside = [
            setting
            for more in levels[levels.index(level) + 1 :]
            for setting in self._untried(more, level, MOST_PROBES_BESIDE)
            if not self._fits(setting.micro_batch, level, level)
        ]
        if len(self._good()) == 1:  # a slope needs two points
            return beside[-1] if beside else None
        model = StepModel(self._run, self._good())
        settings = self._untried(level, level, MOST_PROBES) + beside
        first = [setting for setting in beside if not self._tried(setting.recompute)]
        return _fastest(settings, model, model.likely_once, _LEAST_GAIN) or _fastest(
            first, model, model.most_once, _HOPED_GAIN
        )

    def _untried(self, level: str, base: str, most: int) -> list[AutoSetting]:
        """Return the settings of a recomputation level that may fit into memory."""
        tried = self._tried(level)
        sizes = self._sizes[level] if len(tried) < most else []
        return [AutoSetting(size, level) for size in sizes if size not in tried and self._fits(size, level, base)]

    def _tried(self, level: str) -> dict[int, Probe]:
        return {probe.micro_batch: probe for probe in self.probes if probe.recompute == level}

    def _good(self, level: str | None = None) -> list[Probe]:
        """Return the successful short runs of one recomputation level, or of all, sorted by micro-batch."""
        good = [probe for probe in self.probes if probe.status == "ok" and level in (None, probe.recompute)]
        return sorted(good, key=lambda probe: probe.micro_batch)

    def _memory(self, level: str) -> list[tuple[float, float]]:
        """Return the micro-batches of a level that fit, each with its memory in GiB."""
        return [(probe.micro_batch, probe.peak_memory_gib or 0.0) for probe in self._good(level)]

    def _fits(self, size: int, level: str, base: str) -> bool:
        """Return whether a micro-batch of `size` may fit: no smaller one has failed, and the predicted memory suffices.

        `base` is the level with the least recomputation that fits. The fixed memory of `level` equals that of `base`.
        """
        if any(probe.status != "ok" and probe.micro_batch <= size for probe in self._tried(level).values()):
            return False
        known, of_base = self._memory(level), self._memory(base)
        farthest = _DOUBLE * known[-1][0] if known else _LESS_MEMORY[level] * of_base[-1][0]
        if not known:
            known = [(farthest, of_base[-1][1])]
        if len(known) == 1 and len(of_base) > 1:
            known.insert(0, (0, line(0, of_base[-2:])))
        if len(known) == 1:
            return size <= farthest
        return self._device_gib is None or line(size, known[-2:]) <= self._device_gib


def _fastest(settings: Sequence[AutoSetting], model: StepModel, once: float, gain: float) -> AutoSetting | None:
    """Return the first setting with nearly the fastest prediction, if it beats all measured ones by `gain`."""
    predicted = {setting: model.predicted(setting, once) for setting in settings}
    fastest = min(predicted.values(), default=float("inf"))
    if fastest > model.fastest(once) * (1 - gain):
        return None
    return next(setting for setting in predicted if predicted[setting] <= fastest * (1 + _LEAST_GAIN))
