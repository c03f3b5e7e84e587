"""Describes an engine without loading it: what it accepts, how it is built, what it costs. Loads no torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megabench.cost.job import Candidate, Variant
from megabench.cost.memory import Memory
from megabench.cost.shared_costs import Base
from megabench.models.shape import ModelShape
from megabench.parallel.layout import Layout, divisors
from megabench.precision import PrecisionPolicy
from megabench.settings.reading import ConfigError
from megabench.settings.run_settings import RunSettings
from megabench.settings.setting import EngineSettings


class ResolvedRun(Protocol):
    """What an engine's checks read of a run whose settings are complete; see `config.ResolvedConfig`."""

    @property
    def own(self) -> EngineSettings: ...
    @property
    def model(self) -> str: ...
    @property
    def shape(self) -> ModelShape: ...
    @property
    def world_size(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def kernels(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def policy(self) -> PrecisionPolicy: ...
    @property
    def grad_dtype(self) -> str: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def num_micro_batches(self) -> int: ...


class CostModel(Protocol):
    """Predicts the step time and the memory of an engine's candidates."""

    def parts(self, candidate: Candidate) -> dict[str, float]:
        """Seconds of each part of a step; they add up to the step."""
        ...

    def shortest(self, candidate: Candidate) -> float:
        """A lower bound of the step time in seconds that is quick to compute."""
        ...

    def memory(self, candidate: Candidate) -> Memory:
        """Bytes of the fullest rank."""
        ...

    def host_bytes(self, candidate: Candidate) -> float:
        """Bytes of host memory that offload takes on each host."""
        ...


Options = Mapping[str, Any]  # the engine's settings, or the options of a record


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    `title` and `summary` are for people, `implementation` is "module:class" and imported when the engine is built.
    `settings` declares the settings that not all engines have. `axes` are the parallel axes that the engine can use,
    `recompute` the levels of recomputation that it has. `sharding_stage` is the ZeRO stage that it corresponds to,
    unless the run says. An engine that `needs_blocks` trains only models for which there are parallel blocks. An engine
    that `wants_queues` loses time with a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

    These functions read the settings of a run before and after it is resolved:

    - `read_file` returns the settings that a configuration file of the engine's own gives, in place of those that are
      not among `given`; ConfigError where the two contradict each other;
    - `complete` fills defaults that depend on other settings;
    - `check` raises ConfigError for settings that the engine cannot combine;
    - `why_not_saved` says why a checkpoint could not hold the state of training, None if it can;
    - `environment` is set before CUDA starts unless the user set it.

    These read the engine's settings, or the options of a record:

    - `mode` names the engine's mode ("ZeRO-3"), if it has several; `is_zero3` says whether that is ZeRO-3;
    - `holds_matrices` says whether every rank holds whole matrices, `uses_host` whether the optimizer runs on the host;
    - `compression` describes how gradients are compressed, None if they are not;
    - `plain_steps` counts the first steps, which run unlike the later ones;
    - `fixes_batch` says whether a configuration file of the engine's own sets the global batch;
    - `recorded` returns the options that a record holds in place of those given, such as a file's content;
    - `less_memory` returns the setting to change after a run with these options ran out of memory.

    `variants` gives what the planner predicts, for the number of ranks of a host if several hosts take part.
    `variant_of` gives the variant of a recorded run with these options, and `variant_settings` the settings of a run
    that trains a variant.
    """

    name: str
    title: str
    summary: str
    implementation: str
    cost: Callable[[Base], CostModel]
    sharding_stage: int
    variants: Callable[[int | None], Iterable[Variant]]
    variant_of: Callable[[Options], Variant]
    settings: type[EngineSettings] = EngineSettings
    axes: frozenset[str] = frozenset({"dp"})
    recompute: frozenset[str] = frozenset({"none", "full"})
    needs_blocks: bool = False
    wants_queues: bool = False
    read_file: Callable[[RunSettings, Mapping[str, Any]], Mapping[str, Any]] = lambda run, given: {}
    complete: Callable[[RunSettings], Mapping[str, Any]] = lambda run: {}
    check: Callable[[ResolvedRun], None] = lambda run: None
    why_not_saved: Callable[[ResolvedRun], str | None] = lambda run: None
    environment: Callable[[RunSettings], Mapping[str, str]] = lambda run: {}
    mode: Callable[[Options], str | None] = lambda options: None
    is_zero3: Callable[[Options], bool] = lambda options: False
    holds_matrices: Callable[[Options], bool] = lambda options: False
    uses_host: Callable[[Options], bool] = lambda options: False
    compression: Callable[[Options], str | None] = lambda options: None
    plain_steps: Callable[[Options], int] = lambda options: 0
    fixes_batch: Callable[[Options], bool] = lambda options: False
    recorded: Callable[[Options], Mapping[str, Any]] = lambda options: {}
    less_memory: Callable[[Options], str] = lambda options: "more GPUs"
    variant_settings: Callable[[Any], Mapping[str, Any]] = lambda variant: {}

    def stage_of(self, options: Options) -> int:
        """The ZeRO stage that a run's settings, or the options of its record, amount to."""
        stage = options.get("zero_stage")
        return self.sharding_stage if stage is None else int(stage)

    def gathers_weights(self, options: Options) -> bool:
        """Whether each rank holds a shard of the weights, and gathers a layer when it computes."""
        return self.stage_of(options) == 3

    @property
    def is_data_parallel(self) -> bool:
        """Whether the engine has no parallel axis but dp."""
        return self.axes == {"dp"}


def more_offload(options: Options) -> str:
    """The setting that frees memory in a run that already shards everything."""
    return "more GPUs" if options.get("offload") == "all" else "offload: all"


def check_divides(name: str, size: int | None, world_size: int) -> None:
    """ConfigError unless groups of `size` neighbouring ranks fill the world."""
    if size and world_size % size:
        raise ConfigError(f"{name}={size} does not divide the {world_size} ranks; use one of {divisors(world_size)}")
