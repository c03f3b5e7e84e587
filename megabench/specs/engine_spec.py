"""The description of an engine: the runs that it accepts, and what its settings mean. Loads no torch."""

from collections.abc import Mapping
from typing import Any, Protocol

from megabench.hardware.topology import Topology
from megabench.models.shape import ModelShape
from megabench.optim.optimizers import OPTIMIZERS
from megabench.optim.parameter_groups import HyperParameters
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
    def param_groups(self) -> str | None: ...
    @property
    def clip_grad(self) -> float: ...
    def hyper_parameters(self, name: str, num_dims: int) -> HyperParameters: ...
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


Options = Mapping[str, Any]  # settings of an engine, or options of a record


class EngineSpec:
    """The description of one engine. A subclass sets the attributes, and overrides the methods that do not apply.

    `title` and `summary` are for users. `implementation` is "module:class" and is imported when the engine is built.
    `settings` declares the settings that not all engines have. `axes` are the parallel axes that the engine supports,
    and `recompute` its levels of recomputation. `sharding_stage` is the equivalent ZeRO stage, unless the run sets one.
    `optimizers` are the names of its optimizers, or None for all. An engine with `needs_blocks` trains only models that
    have tensor-parallel blocks. An engine with `wants_queues` is slower with a single hardware queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1).

    The first methods get the settings of a run. The methods with `options` get the engine's settings, or the options
    of a record.
    """

    name: str
    title: str
    summary: str
    implementation: str
    sharding_stage: int
    settings: type[EngineSettings] = EngineSettings
    axes: frozenset[str] = frozenset({"dp"})
    recompute: frozenset[str] = frozenset({"none", "full"})
    optimizers: frozenset[str] | None = None
    needs_blocks: bool = False
    wants_queues: bool = False

    @property
    def is_data_parallel(self) -> bool:
        """Whether data parallelism is the engine's only parallel axis."""
        return self.axes == {"dp"}

    def read_file(self, run: RunSettings, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings from the engine's own configuration file, for settings not in `given`.

        Raise ConfigError if the file contradicts `given`.
        """
        return {}

    def complete(self, run: RunSettings) -> Mapping[str, Any]:
        """Return the defaults of settings that depend on other settings."""
        return {}

    def check(self, run: ResolvedRun) -> None:
        """Raise ConfigError for settings that the engine cannot combine."""

    def settle(self, run: ResolvedRun, topology: Topology) -> tuple[Mapping[str, Any], str | None]:
        """Return the engine's settings whose values depend on the links between ranks, and a sentence about them.

        The sentence is None if there is nothing to say. Raise ConfigError if a given value does not work on these
        links. `topology` is indexed by the run's ranks.
        """
        return {}, None

    def why_not_saved(self, run: ResolvedRun) -> str | None:
        """Return the reason why a checkpoint cannot hold the training state, or None if it can."""
        return None

    def other_work(self, run: ResolvedRun) -> Mapping[str, Any]:
        """Return the fields of the work class in which the program differs from the run, and offers no setting."""
        return {}

    def reads_state(self, run: ResolvedRun) -> bool:
        """Return whether each rank can read its part of the master weights and of the optimizer's state."""
        return self.why_not_saved(run) is None

    def environment(self, run: RunSettings) -> Mapping[str, str]:
        """Return environment variables to set before CUDA starts, unless the user set them."""
        return {}

    def mode(self, options: Options) -> str | None:
        """Return the name of the engine's mode, e.g. "ZeRO-3", or None if the engine has only one mode."""
        return None

    def stage_of(self, options: Options) -> int:
        """Return the ZeRO stage, or the equivalent one."""
        stage = options.get("zero_stage")
        return self.sharding_stage if stage is None else int(stage)

    def gathers_weights(self, options: Options) -> bool:
        """Return whether each rank holds a shard of the weights and gathers a layer to compute it."""
        return self.stage_of(options) == 3

    def holds_matrices(self, options: Options) -> bool:
        """Return whether every rank holds whole matrices, with their gradients and optimizer state."""
        return False

    def has_optimizer(self, name: str, options: Options) -> bool:
        """Return whether the engine trains with this optimizer."""
        is_known = self.optimizers is None or name in self.optimizers
        return is_known and (not OPTIMIZERS[name].needs_matrices or self.holds_matrices(options))

    def uses_host(self, options: Options) -> bool:
        """Return whether the optimizer runs on the host."""
        return bool(options.get("offload", "none") != "none")

    def compression(self, options: Options) -> str | None:
        """Return a description of the gradient compression, or None without compression."""
        return None

    def plain_steps(self, options: Options) -> int:
        """Return the number of first steps that run differently from later ones."""
        return 0

    def fixes_batch(self, options: Options) -> bool:
        """Return whether the engine's own configuration file sets the global batch."""
        return False

    def recorded(self, options: Options) -> Mapping[str, Any]:
        """Return options to record in place of the given ones, such as a file's content."""
        return {}

    def less_memory(self, options: Options) -> str:
        """Return the setting to change after a run ran out of memory."""
        return "more GPUs"


def more_offload(options: Options) -> str:
    """Return the setting that reduces memory in a run that already shards all state."""
    return "more GPUs" if options.get("offload") == "all" else "offload: all"


def check_divides(name: str, size: int | None, world_size: int) -> None:
    """Raise ConfigError unless `size` divides the world size."""
    if size and world_size % size:
        raise ConfigError(f"{name}={size} does not divide the {world_size} ranks; use one of {divisors(world_size)}")
