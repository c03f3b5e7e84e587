"""Describes an engine without loading it: what it accepts, how it is built, what it costs. Loads no torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megabench.cost.base import Base
from megabench.cost.job import Candidate, Offload
from megabench.settings.run import RunSettings


@dataclass(frozen=True)
class Variant:
    """A way to run a data-parallel engine that the planner predicts; the fields are those of `Candidate`."""

    zero_stage: int
    offload: Offload = "none"
    shard_size: int | None = None
    hpz_size: int | None = None
    keeps_weights: bool = False


class CostModel(Protocol):
    """Predicts the step time of an engine's candidates."""

    def parts(self, candidate: Candidate) -> dict[str, float]:
        """Seconds of each part of a step; they add up to the step."""
        ...

    def shortest(self, candidate: Candidate) -> float:
        """A lower bound of the step time in seconds that is quick to compute."""
        ...


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    `title` and `summary` are for people, `implementation` is "module:class" and imported when the engine is built.
    `axes` are the parallel axes that it can use, `recompute` the levels of recomputation that it has.
    `sharding_stage` is the ZeRO stage that it corresponds to, unless the run says. An engine that `needs_blocks` trains
    only models for which there are parallel blocks.

    `less_memory` returns the setting to change after a run with these recorded options ran out of memory. An engine
    that `wants_queues` loses time with a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

    `check` raises ConfigError for settings that the engine cannot combine, `complete` fills defaults, `holds_matrices`
    says whether every rank holds whole matrices, and `environment` is set before CUDA starts unless the user set it.
    `mode` names the engine's mode in error messages ("zero_stage=3"), if it has several. `variants` gives what the
    planner predicts, for the number of ranks of a host if several hosts take part.
    """

    name: str
    title: str
    summary: str
    implementation: str
    cost: Callable[[Base], CostModel]
    sharding_stage: int
    axes: frozenset[str] = frozenset({"dp"})
    recompute: frozenset[str] = frozenset({"none", "full"})
    needs_blocks: bool = False
    wants_queues: bool = False
    less_memory: Callable[[Mapping[str, Any]], str] = lambda options: "more GPUs"
    check: Callable[[RunSettings], None] = lambda run: None
    complete: Callable[[RunSettings], Mapping[str, Any]] = lambda run: {}
    holds_matrices: Callable[[RunSettings], bool] = lambda run: False
    environment: Callable[[RunSettings], Mapping[str, str]] = lambda run: {}
    mode: Callable[[RunSettings], str | None] = lambda run: None
    variants: Callable[[int | None], Iterable[Variant]] = lambda ranks_per_host: ()

    def stage_of(self, options: Mapping[str, Any]) -> int:
        """The ZeRO stage that a run's settings, or the options of its record, amount to."""
        stage = options.get("zero_stage")
        return self.sharding_stage if stage is None else int(stage)

    def gathers_weights(self, options: Mapping[str, Any]) -> bool:
        """Whether each rank holds a shard of the weights, and gathers a layer when it computes."""
        return self.stage_of(options) == 3

    @property
    def is_data_parallel(self) -> bool:
        """Whether the engine has no parallel axis but dp."""
        return self.axes == {"dp"}


def more_offload(options: Mapping[str, Any]) -> str:
    """The setting that frees memory in a run that already shards everything."""
    return "more GPUs" if options.get("offload") == "all" else "offload: all"
