"""Which micro-batch and recomputation to try next, so that few short runs find the fastest setting that fits.

Loads no torch. Two models, fitted to what was seen, point to the next try: memory grows linearly with the micro-batch,
and the time of a step is that of step_model.py. What is chosen is always what was measured to be fastest.
"""

from collections.abc import Sequence

from megabench.autotune.step_model import StepModel, line
from megabench.config import ResolvedConfig
from megabench.config.auto import Setting
from megabench.record import Probe

MOST_PROBES = 4  # that fit, and of one level of recomputation in all
MOST_PROBES_BESIDE = 3  # of a level that computes more again than one that fits

_LEAST_GAIN = 0.003  # smaller gains are noise, even on one GPU
_HOPED_GAIN = 0.1  # worth a try, though it comes only if the probes' steps are mostly what comes but once

# so many times larger may a micro-batch be for the memory of one that computes nothing again, to be tried at all …
_LESS_MEMORY = {"selective": 4 / 3, "full": 4}
_DOUBLE = 2  # … and so many times larger than one that fits, until two tell what a sequence takes


class Search:
    """The search for one run: `next` says what to try, `heard` takes how it went, `best` is what was found."""

    def __init__(self, settings: Sequence[Setting], run: ResolvedConfig) -> None:
        """`settings` are those that the run may have, and `run` is resolved under any of them."""
        self.probes: list[Probe] = []
        self._run = run
        self._device_gib: float | None = None
        self._sizes: dict[str, list[int]] = {}
        for setting in settings:
            self._sizes.setdefault(setting.recompute, []).append(setting.micro_batch)

    def tell(self, probe: Probe, device_gib: float | None) -> None:
        """Takes the result of a probe, which ran on devices of `device_gib`."""
        self.probes.append(probe)
        self._device_gib = device_gib or self._device_gib

    @property
    def best(self) -> Setting | None:
        """The fastest so far, and the one with less memory of two that are as fast; None when nothing fits."""
        good = self._good()
        if not good:
            return None
        model = StepModel(self._run, good)
        enough = model.fastest(model.likely_once) * (1 + _LEAST_GAIN)
        as_fast = [probe for probe in good if model.measured(probe, model.likely_once) <= enough]
        chosen = min(as_fast, key=lambda probe: probe.peak_memory_gib or 0.0)
        return Setting(chosen.micro_batch, chosen.recompute)

    def next(self) -> Setting | None:
        """What to try next; None when nothing promises more.

        The two smallest micro-batches of the first level that fits, then where memory and time, drawn out, point to:
        a larger one, or one that fits only if more is computed again. That is worth a try because a micro-batch may
        cost much beside its compute, as gathering weights across a slow network does.
        """
        if len(self._good()) == MOST_PROBES:
            return None
        for level, (smallest, *larger) in self._sizes.items():
            tried = self._tried(level)
            if smallest not in tried:
                return Setting(smallest, level)
            if self._good(level):
                return Setting(larger[0], level) if larger and larger[0] not in tried else self._promising(level)
        return None

    def _promising(self, level: str) -> Setting | None:
        """What is predicted to beat all that was measured, beside the two smallest of a level."""
        levels = list(self._sizes)
        beside = [
            setting
            for more in levels[levels.index(level) + 1 :]
            for setting in self._untried(more, level, MOST_PROBES_BESIDE)
            if not self._fits(setting.micro_batch, level, level)
        ]
        if len(self._good()) == 1:  # one point gives no slope
            return beside[-1] if beside else None
        model = StepModel(self._run, self._good())
        settings = self._untried(level, level, MOST_PROBES) + beside
        first = [setting for setting in beside if not self._tried(setting.recompute)]
        return _fastest(settings, model, model.likely_once, _LEAST_GAIN) or _fastest(
            first, model, model.most_once, _HOPED_GAIN
        )

    def _untried(self, level: str, base: str, most: int) -> list[Setting]:
        """The settings of a level that may fit."""
        tried = self._tried(level)
        sizes = self._sizes[level] if len(tried) < most else []
        return [Setting(size, level) for size in sizes if size not in tried and self._fits(size, level, base)]

    def _tried(self, level: str) -> dict[int, Probe]:
        return {probe.micro_batch: probe for probe in self.probes if probe.recompute == level}

    def _good(self, level: str | None = None) -> list[Probe]:
        """The probes that fit, of one level or of all, by micro-batch."""
        good = [probe for probe in self.probes if probe.status == "ok" and level in (None, probe.recompute)]
        return sorted(good, key=lambda probe: probe.micro_batch)

    def _memory(self, level: str) -> list[tuple[float, float]]:
        """The micro-batches of a level that fit, each with the GiB that it takes."""
        return [(probe.micro_batch, probe.peak_memory_gib or 0.0) for probe in self._good(level)]

    def _fits(self, size: int, level: str, base: str) -> bool:
        """Whether a micro-batch of `size` may fit: none as large has failed, and memory suffices.

        `base` is the level that fits with the least recomputation; beside its micro-batches, `level` takes as much.
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


def _fastest(settings: Sequence[Setting], model: StepModel, once: float, gain: float) -> Setting | None:
    """The first of the settings that are predicted to be about fastest, if by `gain` faster than all that was tried."""
    predicted = {setting: model.predicted(setting, once) for setting in settings}
    fastest = min(predicted.values(), default=float("inf"))
    if fastest > model.fastest(once) * (1 - gain):
        return None
    return next(setting for setting in predicted if predicted[setting] <= fastest * (1 + _LEAST_GAIN))
