"""The description of an engine: the settings it accepts, its implementation and its cost. Loads no torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megabench.cost.job import Candidate, Job, Variant
from megabench.cost.memory import Memory
from megabench.cost.profile import Profile
from megabench.cost.shared_costs import Base
from megabench.models.shape import ModelShape
from megabench.parallel.layout import Layout, divisors
from megabench.precision import PrecisionPolicy
from megabench.settings.reading import ConfigError
from megabench.settings.run_settings import RunSettings
from megabench.settings.setting import EngineSettings


class ResolvedRun(Protocol):
    """The fields of `config.ResolvedConfig` that the checks of engines read."""

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
    def fp8_recipe(self) -> str | None: ...
    @property
    def num_layers_at_start_in_bf16(self) -> int: ...
    @property
    def num_layers_at_end_in_bf16(self) -> int: ...
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
    """Predicts the step time of an engine's candidates."""

    def parts(self, candidate: Candidate) -> dict[str, float]:
        """Return the seconds of each part of a step. The sum of all parts is the step time."""
        ...

    def shortest(self, candidate: Candidate) -> float:
        """Return a lower bound of the step time in seconds that is quick to compute."""
        ...


Options = Mapping[str, Any]  # settings of an engine, or options of a record


@dataclass(frozen=True)
class EngineSpec:
    """The description of one engine.

    `title` and `summary` are for users. `implementation` is "module:class" and is imported when the engine is built.
    `settings` declares the settings that not all engines have. `axes` are the parallel axes that the engine supports,
    and `recompute` its levels of recomputation. `sharding_stage` is the equivalent ZeRO stage, unless the run sets one.
    An engine with `needs_blocks` trains only models that have tensor-parallel blocks. An engine with `wants_queues` is
    slower with a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1). With `adds_gradients`, matrix products can add
    weight gradients to their buffers.

    These functions read the settings of a run before and after it is resolved:

    - `read_file` returns settings from the engine's own configuration file, for settings not in `given`. `read_file`
      raises ConfigError if the file contradicts `given`.
    - `complete` sets defaults that depend on other settings.
    - `check` raises ConfigError for settings that the engine cannot combine.
    - `why_not_saved` returns the reason why a checkpoint cannot hold the training state, or None.
    - `environment` returns environment variables to set before CUDA starts, unless the user set them.

    `memory` returns the bytes by part of the rank that uses the most memory. `host_bytes` returns the bytes of host
    memory that offload uses on each host, given the number of ranks per host.

    These functions read the engine's settings, or the options of a record:

    - `mode` returns the name of the engine's mode ("ZeRO-3"), if it has several. `is_zero3` returns whether it is
      ZeRO-3.
    - `holds_matrices` returns whether every rank holds whole matrices. `uses_host` returns whether the optimizer runs
      on the host.
    - `compression` describes the gradient compression, or is None without compression.
    - `plain_steps` returns the number of first steps that run differently from later ones.
    - `fixes_batch` returns whether the engine's own configuration file sets the global batch.
    - `recorded` returns options to record in place of the given ones, such as a file's content.
    - `less_memory` returns the setting to change after a run with these options ran out of memory.

    `variants` returns the variants that the planner predicts for a layout. Its first argument is the number of ranks
    per host, or None if the run uses one host. `variant_of` returns the variant of a recorded run with these options.
    `variant_settings` returns the settings of a run that trains a variant.
    """

    name: str
    title: str
    summary: str
    implementation: str
    cost: Callable[[Base], CostModel]
    memory: Callable[[Job, Candidate, Profile], Memory]
    sharding_stage: int
    variants: Callable[[int | None, Layout], Iterable[Variant]]
    variant_of: Callable[[Options], Variant]
    settings: type[EngineSettings] = EngineSettings
    axes: frozenset[str] = frozenset({"dp"})
    recompute: frozenset[str] = frozenset({"none", "full"})
    needs_blocks: bool = False
    wants_queues: bool = False
    adds_gradients: bool = False
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
    host_bytes: Callable[[Job, Candidate, int], float] = lambda job, candidate, ranks_per_host: 0.0

    def stage_of(self, options: Options) -> int:
        """Return the ZeRO stage of a run's settings or of a record's options."""
        stage = options.get("zero_stage")
        return self.sharding_stage if stage is None else int(stage)

    def gathers_weights(self, options: Options) -> bool:
        """Return whether each rank holds a shard of the weights and gathers a layer to compute it."""
        return self.stage_of(options) == 3

    @property
    def is_data_parallel(self) -> bool:
        """Whether data parallelism is the engine's only parallel axis."""
        return self.axes == {"dp"}


def more_offload(options: Options) -> str:
    """Return the setting that reduces memory in a run that already shards all state."""
    return "more GPUs" if options.get("offload") == "all" else "offload: all"


def check_divides(name: str, size: int | None, world_size: int) -> None:
    """Raise ConfigError unless `size` divides the world size."""
    if size and world_size % size:
        raise ConfigError(f"{name}={size} does not divide the {world_size} ranks; use one of {divisors(world_size)}")
