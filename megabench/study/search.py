"""Which micro-batch and recomputation to try next, so that few short runs find the fastest setting that fits.

Loads no torch. Two models, fitted to what was seen, point to the next try: memory grows linearly with the micro-batch,
and so does the time of one micro-batch, c(m) = a + b·m, of which a step has num_micro_batches plus the pipeline's
bubble. What is chosen is always what was measured to be fastest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.parallel.layout import LayoutError, divisors
from megabench.record import Probe

MOST_PROBES = 4  # of one level of recomputation
MOST_PROBES_OF_FULL = 2  # of whole layers, beside a level that fits
PROBE_STEPS, PROBE_WARMUP = 3, 1

_MEMORY_SHARE = 0.97  # of a device: the CUDA context and NCCL's buffers need the rest
_LEAST_GAIN = 0.01  # a smaller gain is noise
_FORWARD_TWICE = 4 / 3  # compute of a step whose layers run forward twice, to that of one whose layers do once

# what tells settings apart, in a step of a probe: tokens of a replica, sequences and micro-batches of a stage
_ENOUGH_TOKENS, _ENOUGH_SEQUENCES, _ENOUGH_ROUNDS = 65536, 16, 4


@dataclass(frozen=True)
class Setting:
    """What a probe tries."""

    micro_batch: int
    recompute: str

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}, recompute {self.recompute}"


def settle(config: RunConfig, setting: Setting) -> RunConfig:
    """`config` with what `setting` found in the place of "auto"."""
    return config.model_copy(update={name: getattr(setting, name) for name in config.to_find})


def legal_settings(config: RunConfig, world_size: int, device: Literal["cpu", "cuda"]) -> list[Setting]:
    """The settings that `config` leaves open and may have: less recomputation first, then smaller micro-batches.

    The only one of a configuration that leaves nothing open. Raises what the first raises when none is legal.
    """
    legal, first_error = [], None
    for setting in _settings(config, world_size):
        try:
            settle(config, setting).resolve(world_size, device)
            legal.append(setting)
        except (ConfigError, LayoutError) as error:
            first_error = first_error or error
    if not legal and first_error:
        raise first_error
    return legal


def _settings(config: RunConfig, world_size: int) -> list[Setting]:
    shape = config.shape
    if config.micro_batch == "auto":
        replicas = config.layout.with_world_size(world_size).data_parallel
        micro_batches = divisors(max(1, (config.global_batch or shape.global_batch) // replicas))
    else:
        micro_batches = [config.micro_batch or shape.micro_batch]
    levels = ["none", "selective", "full"] if config.recompute == "auto" else [config.recompute]
    return [Setting(micro_batch, level) for level in levels for micro_batch in micro_batches]


def probe_config(config: RunConfig, setting: Setting, world_size: int, device: Literal["cpu", "cuda"]) -> RunConfig:
    """The short run that tries a legal `setting` of `config`: few steps, and not more sequences than it takes."""
    run = settle(config, setting).resolve(world_size, device)
    sequences = run.global_batch // run.layout.data_parallel
    enough = max(
        _ENOUGH_SEQUENCES * run.pp, _ENOUGH_ROUNDS * run.pp * run.micro_batch, _ENOUGH_TOKENS // run.seq_length
    )
    whole = run.micro_batch * (run.pp if run.vp > 1 else 1)
    fitting = [number for number in divisors(sequences) if number % whole == 0]
    changes = {
        "global_batch": min((n for n in fitting if n >= enough), default=sequences) * run.layout.data_parallel,
        "steps": PROBE_STEPS,
        "warmup_steps": PROBE_WARMUP,
        "profile": False,
        **dict.fromkeys(("save", "save_every", "keep", "load", "out", "tensorboard")),
    }
    return settle(config, setting).model_copy(update=changes)


class Search:
    """The search for one run: `next` says what to try, `heard` takes how it went, `best` is what was found."""

    def __init__(self, settings: Sequence[Setting], run: ResolvedConfig) -> None:
        """`settings` are those that the run may have, and `run` is resolved under any of them."""
        self.probes: list[Probe] = []
        self._replicas = run.layout.data_parallel
        self._sequences = run.global_batch // self._replicas
        self._bubble = (run.pp - 1) / run.vp  # micro-batches' time that a stage of a pipeline waits in a step
        self._device_gib: float | None = None
        self._sizes: dict[str, list[int]] = {}
        for setting in settings:
            self._sizes.setdefault(setting.recompute, []).append(setting.micro_batch)

    def heard(self, probe: Probe, device_gib: float | None) -> None:
        """Takes the result of a probe, which ran on devices of `device_gib`."""
        self.probes.append(probe)
        self._device_gib = device_gib or self._device_gib

    @property
    def best(self) -> Setting | None:
        """The fastest so far, and the one with less memory of two that are as fast; None when nothing fits."""
        good = [probe for probe in self.probes if probe.status == "ok"]
        if not good:
            return None
        as_fast = [probe for probe in good if self._run_seconds(probe) <= self._fastest * (1 + _LEAST_GAIN)]
        chosen = min(as_fast, key=lambda probe: probe.peak_memory_gib or 0.0)
        return Setting(chosen.micro_batch, chosen.recompute)

    def next(self) -> Setting | None:
        """What to try next; None when nothing promises more."""
        for level in self._sizes:
            if micro_batch := self._next_of(level):
                return Setting(micro_batch, level)
            if self._good(level):
                full = self._next_of_full(level) if level != "full" and "full" in self._sizes else None
                return Setting(full, "full") if full else None
        return None

    def _next_of(self, level: str) -> int | None:
        """The next micro-batch of a level: the two smallest, then where memory and time, drawn out, point to."""
        smallest, *larger = self._sizes[level]
        tried, good = self._tried(level), self._good(level)
        if smallest not in tried:
            return smallest
        if not good or not larger or len(tried) == MOST_PROBES:
            return None
        if larger[0] not in tried:
            return larger[0]
        if len(good) == 1:
            return None
        untried = [size for size in self._sizes[level] if size not in tried and self._fits(size, good)]
        return self._promising({size: self._predicted(size, good) for size in untried})

    def _next_of_full(self, level: str) -> int | None:
        """A micro-batch that fits only with whole layers computed again: worth a try, because a micro-batch may cost
        much beside its compute, as gathering weights across a slow network does."""
        good, tried = self._good(level), self._tried("full")
        too_large = min((size for size in self._sizes["full"] if not self._fits(size, good)), default=None)
        if too_large is None or len(tried) == MOST_PROBES_OF_FULL:
            return None
        below = min((size for size in tried if tried[size].status != "ok"), default=self._sizes["full"][-1] + 1)
        untried = [size for size in self._sizes["full"] if too_large <= size < below and size not in tried]
        if len(good) == 1:  # no slope to go by
            return untried[0] if untried and not tried else None
        return self._promising({size: self._predicted(size, good, compute=_FORWARD_TWICE) for size in untried})

    def _promising(self, predicted: dict[int, float]) -> int | None:
        """The smallest micro-batch that is predicted to be about fastest, if it beats all that was measured."""
        fastest = min(predicted.values(), default=float("inf"))
        if fastest > self._fastest * (1 - _LEAST_GAIN):
            return None
        return next(size for size in predicted if predicted[size] <= fastest * (1 + _LEAST_GAIN))

    def _tried(self, level: str) -> dict[int, Probe]:
        return {probe.micro_batch: probe for probe in self.probes if probe.recompute == level}

    def _good(self, level: str) -> list[Probe]:
        """The probes of a level that fit, by micro-batch."""
        tried = self._tried(level)
        return [tried[size] for size in sorted(tried) if tried[size].status == "ok"]

    def _fits(self, size: int, good: Sequence[Probe]) -> bool:
        """Whether a micro-batch of `size` may fit where `good` did: none as large has failed, and memory suffices."""
        if any(p.status != "ok" and p.micro_batch <= size for p in self._tried(good[0].recompute).values()):
            return False
        if self._device_gib is None or len(good) == 1:
            return True
        needed = _line(size, [(probe.micro_batch, probe.peak_memory_gib or 0.0) for probe in good[-2:]])
        return needed <= _MEMORY_SHARE * self._device_gib

    def _predicted(self, size: int, good: Sequence[Probe], compute: float = 1.0) -> float:
        """Seconds of the run's step at a micro-batch of `size`, the part that grows with it taken `compute` times."""
        points = [(probe.micro_batch, self._micro_batch_seconds(probe)) for probe in good[-2:]]
        fixed, least = _line(0, points), points[-1][1]
        # a larger micro-batch that took less time at all was noise, which may not be drawn out
        one = max(fixed + compute * (_line(size, points) - fixed), least)
        return (self._sequences / size + self._bubble) * one

    @property
    def _fastest(self) -> float:
        return min(self._run_seconds(probe) for probe in self.probes if probe.status == "ok")

    def _run_seconds(self, probe: Probe) -> float:
        """Seconds of the run's own step, whose batch may be larger than the probe's."""
        return (self._sequences / probe.micro_batch + self._bubble) * self._micro_batch_seconds(probe)

    def _micro_batch_seconds(self, probe: Probe) -> float:
        assert probe.step_seconds is not None
        rounds = probe.global_batch / self._replicas / probe.micro_batch + self._bubble
        return probe.step_seconds / rounds


def _line(x: float, points: Sequence[tuple[float, float]]) -> float:
    """The value at `x` of the straight line through two points."""
    (x1, y1), (x2, y2) = points
    return y1 + (y2 - y1) / (x2 - x1) * (x - x1)
