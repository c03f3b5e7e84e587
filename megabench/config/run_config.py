"""RunConfig: the configuration of a run, and its validation."""

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megabench.models.find import find_model
from megabench.models.mapping import hidden_matrices, hugging_face_shapes
from megabench.models.shape import ModelShape
from megabench.optim.optimizers import OPTIMIZERS
from megabench.optim.parameter_groups import HyperParameters, hyper_parameters, read_groups
from megabench.optim.schedules import SCHEDULES
from megabench.parallel.layout import GIVEN_SIZES, Layout, divisors
from megabench.precision import POLICIES, PrecisionPolicy
from megabench.runtime.environment import is_secret
from megabench.settings.reading import ConfigError, explain
from megabench.settings.run_settings import RunSettings
from megabench.settings.setting import EngineSettings, names
from megabench.specs.all_settings import FIELDS, SETTINGS, engines_with, is_default
from megabench.specs.engine_spec import EngineSpec
from megabench.specs.fp8_check import check_fp8
from megabench.specs.hints import TABLES, better_value, hint
from megabench.specs.optimizer_check import check_optimizer
from megabench.specs.registry import ENGINES, ENGINES_AND_PROGRAMS, PROGRAMS

assert {*names(SETTINGS, role="size")} == {*GIVEN_SIZES}, "every size of a layout has a setting"


# Sketches are those of the first updates, because gradients of later ones contain the rounding of earlier ones.
STEPS_OF_SKETCHES = 3


class RunConfig(RunSettings):
    """The configuration of a run. Fields that default to None are filled by `resolve` from the model or the device.

    A RunConfig is created from flat fields, and stores the settings of its engine in `own`.
    """

    @classmethod
    def parse(cls, fields: Mapping[str, Any], where: str = "") -> Self:
        """Create a RunConfig from untyped fields.

        Raises ConfigError, with similar names for unknown keys. `where` names the source.
        """
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            raise ConfigError(where + explain(error, FIELDS, _hint, better_value)) from None

    @model_validator(mode="before")
    @classmethod
    def _compose(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Move the engine's settings into `own`. Settings of other engines must be at their defaults."""
        if isinstance(fields.get("own"), EngineSettings):
            return fields
        if "own" in fields:
            raise PydanticCustomError("sentence", "unknown setting 'own'")
        engine = str(fields.get("engine", RunSettings.model_fields["engine"].default))
        common = {name: value for name, value in fields.items() if name not in SETTINGS or not engines_with(name)}
        if engine not in ENGINES_AND_PROGRAMS:
            return common | {"own": EngineSettings()}  # the validator of `engine` rejects an unknown name later
        given = {name: fields[name] for name in fields.keys() - common.keys()}
        for name in [name for name in given if engine not in engines_with(name)]:
            if not is_default(name, given.pop(name)):
                raise PydanticCustomError("sentence", "{text}", {"text": _not_its_setting(name, engine, fields)})
        return common | {"own": ENGINES_AND_PROGRAMS[engine].settings.model_validate(given)}

    def flat(self, **dump: Any) -> dict[str, Any]:
        """Return all settings by name, including those in `own`. `dump` is passed to pydantic's `model_dump`."""
        return self.model_dump(**dump, exclude={"own"}) | self.own.model_dump(**dump)

    def every(self) -> dict[str, Any]:
        """Return the settings of all engines by name. Settings of other engines have their defaults."""
        return {name: field.default for name, field in FIELDS.items()} | self.flat()

    def given(self) -> dict[str, Any]:
        """Return the settings that the user gave, by name."""
        return self.flat(exclude_unset=True)

    @property
    def shape(self) -> ModelShape:
        return find_model(self.model, self.num_layers)

    @field_validator(*TABLES)
    @classmethod
    def _is_in_its_table(cls, value: str | None, info: ValidationInfo) -> str | None:
        table = TABLES[info.field_name or ""]
        if value is not None and value not in table:
            raise PydanticCustomError("choice", "is not known; use one of {names}", {"names": ", ".join(table)})
        return value

    @property
    def spec(self) -> EngineSpec:
        """The description of the engine, or of the program."""
        return ENGINES_AND_PROGRAMS[self.engine]

    @property
    def options(self) -> dict[str, Any]:
        """The settings of the engine that not all engines have."""
        return self.own.model_dump()

    @property
    def layout(self) -> Layout:
        """Return the layout with dp unset. `resolve` computes dp and checks all sizes."""
        return Layout(**{name: getattr(self, name) for name in GIVEN_SIZES})

    @property
    def auto_settings(self) -> tuple[str, ...]:
        """The names of the settings that are "auto". Short runs find their values before `resolve` is called."""
        settings = self.flat()
        return tuple(name for name in names(SETTINGS, searchable=True) if settings.get(name) == "auto")

    def resolve(self, world_size: int, device: Literal["cpu", "cuda"]) -> "ResolvedConfig":
        """Fill in defaults and check all rules. Raises ConfigError, LayoutError or UnknownModelError."""
        if self.auto_settings:
            raise ConfigError(
                f"{self.auto_settings[0]}=auto works only with megabench train and compare. Give an explicit value."
            )
        self._check_engine()
        run = self.with_file()._resolve(world_size, device)
        run._check_saving()
        check_fp8(run)
        run.spec.check(run)
        return run

    def with_file(self) -> "RunConfig":
        """Return this configuration with the settings of its engine's configuration file, such as a DeepSpeed JSON.

        Raises ConfigError if the file contradicts a given setting.
        """
        given = self.given()
        said = self.spec.read_file(self, given)
        return type(self).parse({**given, **said}) if said else self

    def _resolve(self, world_size: int, device: Literal["cpu", "cuda"]) -> "ResolvedConfig":
        shape = self.shape
        self._check_model_fits(shape)
        self._check_placement(world_size)
        if max(self.betas) >= 1:
            raise ConfigError(f"betas={self.betas} must be below 1, e.g. 0.9 0.95")
        precision = self.precision or ("bf16" if device == "cuda" else "fp32")
        policy = POLICIES[precision]
        if self.emulate_network and self.emulate_network.transport == "shared_memory" and device == "cpu":
            raise ConfigError(
                "emulate_network: transport=shared_memory is a plugin of NCCL, which connects only GPUs; on CPU, use "
                "transport=sockets"
            )
        if policy.needs_gpu and device == "cpu":
            others = " or ".join(name for name, other in POLICIES.items() if not other.needs_gpu)
            raise ConfigError(f"precision={precision} needs a GPU; use {others} on CPU")
        if OPTIMIZERS[self.optimizer].needs_matrices and not self.spec.holds_matrices(self.options):
            whole = [name for name, spec in ENGINES.items() if spec.holds_matrices({})]
            raise ConfigError(
                f"optimizer={self.optimizer} needs whole matrices on every rank, but {self._mode} shards them; use "
                f"{''.join(f'--engine {name}, or ' for name in whole)}optimizer=adamw"
            )
        if self.spec.optimizers is not None and self.optimizer not in self.spec.optimizers:
            raise ConfigError(
                f"the {self.engine} engine has no optimizer={self.optimizer}; use optimizer="
                f"{' or '.join(sorted(self.spec.optimizers))}, or another engine"
            )
        check_optimizer(self.optimizer, shape)
        self._check_groups(shape)
        if self.grad_dtype not in policy.grad_dtypes:
            others = " or ".join(name for name, other in POLICIES.items() if self.grad_dtype in other.grad_dtypes)
            raise ConfigError(
                f"grad_dtype={self.grad_dtype} works only with precision={others}, not {precision}; use grad_dtype=fp32"
            )
        filled = {
            "seq_length": self.seq_length or shape.seq_length,
            "micro_batch": self.micro_batch or shape.micro_batch,
            "global_batch": self.global_batch or shape.global_batch,
            "precision": precision,
            "fp8_recipe": self.fp8_recipe or ("tensorwise" if policy.has_fp8_products else None),
            **self._learning_rates(shape),
            "param_groups": "; ".join(map(str, read_groups(self.param_groups))) or None,
            "device": device,
            "tensorboard": self.tensorboard or (self.out / "tensorboard" if self.out else None),
            **self.spec.complete(self),
        }
        self.layout.with_world_size(world_size)
        run = ResolvedConfig.model_validate(self.flat() | filled | {"world_size": world_size})
        run.layout.check_model(shape, run.seq_length)
        run.layout.check_batch(run.global_batch, run.micro_batch)
        return run

    def _check_groups(self, shape: ModelShape) -> None:
        """Raise ConfigError for parameter groups that cannot be read, match nothing, or set betas without a use."""
        try:
            groups = read_groups(self.param_groups)
        except ValueError as error:
            raise ConfigError(f"param_groups: {error}") from None
        if not groups:
            return
        optimizer, names = OPTIMIZERS[self.optimizer], list(hugging_face_shapes(shape))
        hidden = hidden_matrices(shape) if optimizer.needs_layers else frozenset()
        for group in groups:
            members = list(filter(group.contains, names))
            if not members:
                raise ConfigError(
                    f"param_groups: no parameter of {self.model} matches {group.pattern!r}; use a pattern of names "
                    f"such as {names[0]} and {names[-1]}"
                )
            without = [name for name in members if name in hidden or not optimizer.has_betas]
            if without and {"beta1", "beta2"} & group.values.keys():
                raise ConfigError(
                    f"param_groups: {self.optimizer} has no betas for {without[0]}, which matches {group.pattern!r}; "
                    f"omit beta1 and beta2"
                )

    def _learning_rates(self, shape: ModelShape) -> dict[str, float | None]:
        """Return the settings of the learning rate. Raises ConfigError if the schedule has no use for one of them."""
        lr = self.lr or shape.learning_rate
        lr_warmup = shape.lr_warmup if self.lr_warmup is None else self.lr_warmup
        min_lr, decay_steps, schedule = self.min_lr, self.decay_steps, SCHEDULES[self.schedule]
        if not schedule.decays:
            if min_lr is not None:
                raise ConfigError(f"schedule={self.schedule} keeps lr to the end; omit min_lr={min_lr:g}")
            min_lr = lr
        elif min_lr is None:
            min_lr = lr / 10
        if min_lr > lr:
            raise ConfigError(f"min_lr={min_lr:g} is above lr={lr:g}; use a min_lr between 0 and lr")
        if schedule.has_decay_steps:
            decay_steps = decay_steps or max(1, self.steps // 10)
            if self.decay_steps and lr_warmup + decay_steps > self.steps:
                raise ConfigError(
                    f"decay_steps={decay_steps} and lr_warmup={lr_warmup} are more than steps={self.steps} together; "
                    f"use smaller ones"
                )
        elif decay_steps:
            others = [name for name, other in SCHEDULES.items() if other.has_decay_steps]
            raise ConfigError(
                f"decay_steps={decay_steps} works only with schedule={' or '.join(others)}, "
                f"not {self.schedule}; omit it"
            )
        return {"lr": lr, "min_lr": min_lr, "lr_warmup": lr_warmup, "decay_steps": decay_steps}

    def _check_model_fits(self, shape: ModelShape) -> None:
        if self.spec.needs_blocks and not shape.table.has_parallel_blocks:
            others = [name for name, spec in ENGINES.items() if not spec.needs_blocks]
            raise ConfigError(
                f"{shape.why_no_blocks}; the {self.engine} engine has no tensor-parallel blocks for it, and "
                f"{_listed(others)} train it: add --engine {others[0]}, or use a Llama, Mistral or Qwen model"
            )
        length = self.seq_length or shape.seq_length
        if shape.max_seq_length and length > shape.max_seq_length:
            raise ConfigError(
                f"seq_length={length} exceeds the {shape.max_seq_length} positions of {self.model}; use a smaller "
                f"seq_length"
            )

    def _check_placement(self, world_size: int) -> None:
        if self.strict_placement and self.placement == "spread-tp":
            raise ConfigError(
                "strict_placement keeps TP inside NVLink domains, but placement=spread-tp does not; omit one of them"
            )
        if self.emulate_hosts and world_size % self.emulate_hosts:
            raise ConfigError(
                f"emulate_hosts={self.emulate_hosts} does not divide the {world_size} ranks; "
                f"use one of {divisors(world_size)}"
            )
        if self.emulate_network and (self.emulate_hosts or 1) == 1:
            raise ConfigError(
                f"emulate_network={self.emulate_network} limits the network between emulated hosts, but "
                f"emulate_hosts={self.emulate_hosts}; use emulate_hosts=2 or more, or omit emulate_network"
            )

    @property
    def _mode(self) -> str:
        """The name of the engine, with its mode if it has several, e.g. "ZeRO-3 of the deepspeed engine"."""
        mode = self.spec.mode(self.options)
        return f"{mode} of the {self.engine} engine" if mode else f"the {self.engine} engine"

    def _check_engine(self) -> None:
        axes = self.spec.axes
        for axis in GIVEN_SIZES:
            if axis not in axes and (size := getattr(self, axis)) > 1:
                others = [name for name, spec in ENGINES.items() if axis in spec.axes]
                supported = "data parallelism" if self.spec.is_data_parallel else _listed(sorted(axes))
                raise ConfigError(
                    f"{self._mode} supports only {supported}, but {axis}={size}; use {axis}=1"
                    + (f", or --engine {' or '.join(others)} for {axis}={size}" if others else "")
                )
        if self.recompute not in self.spec.recompute:
            others = [name for name, spec in ENGINES.items() if self.recompute in spec.recompute]
            raise ConfigError(
                f"recompute={self.recompute} needs the {_listed(others)} engine; use none or full with {self.engine}"
            )

    def flags(self, always: Collection[str] = ()) -> list[str]:
        """Return the command-line flags of this configuration, without defaults except those of the fields `always`."""
        words: list[str] = []
        settings = self.flat()
        for name in FIELDS:
            value = settings.get(name)
            if value is not None and (name in always or not is_default(name, value)):
                values = () if isinstance(value, bool) else value if isinstance(value, tuple) else (value,)
                words += [f"--{'no-' * (value is False)}{name.replace('_', '-')}", *map(str, values)]
        return words

    def command(
        self,
        world_size: int,
        env: Mapping[str, str] | None = None,
        processes_by_host: Sequence[int] = (),
        always: Collection[str] = (),
    ) -> str:
        """Return the shell command that runs this configuration, with these environment variables.

        By default, the command is for one machine. With the numbers of processes of several hosts, it is for every
        host. It has the fields `always` even if they are defaults. The command refers to secrets instead of containing
        them, as in API_KEY="$API_KEY".
        """
        variables = [
            f'{name}="${name}"' if is_secret(name, value) else f"{name}={shlex.quote(value)}"
            for name, value in (env or {}).items()
        ]
        where = ["--nproc-per-node", str(world_size)]
        if len(processes_by_host) > 1:
            sizes = set(processes_by_host)
            where = ["--nnodes", str(len(processes_by_host))]
            where += ["--nproc-per-node", str(sizes.pop()) if len(sizes) == 1 else "gpu"]
            where += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
        return " ".join([*variables, shlex.join(["torchrun", *where, "-m", "megabench.train", *self.flags(always)])])


class ResolvedConfig(RunConfig):
    """A RunConfig whose fields all have values, checked for `world_size` ranks on `device`."""

    world_size: PositiveInt
    seq_length: PositiveInt
    micro_batch: PositiveInt
    global_batch: PositiveInt
    recompute: Literal["none", "selective", "full"]
    lr: PositiveFloat
    lr_warmup: NonNegativeInt
    min_lr: NonNegativeFloat
    precision: str
    device: Literal["cpu", "cuda"]

    @property
    def policy(self) -> PrecisionPolicy:
        """How the run computes."""
        return POLICIES[self.precision]

    @property
    def fp8_layers(self) -> range:
        """The numbers of the layers with fp8 products."""
        if not self.policy.has_fp8_products:
            return range(0)
        return range(self.num_layers_at_start_in_bf16, self.shape.num_layers - self.num_layers_at_end_in_bf16)

    @property
    def emulates_fp8(self) -> bool:
        """Whether fp8 products are emulated: CPUs multiply the fp8 values in fp32."""
        return bool(self.fp8_layers) and self.device == "cpu"

    @property
    def can_be_saved(self) -> bool:
        """Whether the training state of this run can be saved."""
        return self.spec.why_not_saved(self) is None

    def _check_saving(self) -> None:
        for name in ("save_every", "keep"):
            if (value := getattr(self, name)) is not None and self.save is None:
                raise ConfigError(f"{name}={value} needs a directory for checkpoints; add --save DIR, or omit {name}")
        if self.on_nan == "rollback" and self.save_every is None:
            raise ConfigError("on_nan=rollback needs checkpoints to return to; add --save DIR --save-every N")
        if (self.save or self.load) and (reason := self.spec.why_not_saved(self)):
            raise ConfigError(reason)
        if self.sketches and (reason := self.why_no_sketches):
            raise ConfigError(f"sketches={self.sketches} needs {reason}")

    @property
    def why_no_sketches(self) -> str | None:
        """What the run lacks to write sketches of its tensors, or None."""
        if self.engine in PROGRAMS and not self.has_readable_moments:
            return f"a program whose optimizer state can be read, and {self._mode} has none"
        if self.steps < STEPS_OF_SKETCHES:
            return f"{STEPS_OF_SKETCHES} steps; use steps={STEPS_OF_SKETCHES} or more"
        if not self.has_readable_moments and self.warmup_steps < STEPS_OF_SKETCHES:
            return (
                f"{STEPS_OF_SKETCHES} warm-up steps with {self._mode} and optimizer={self.optimizer}, because "
                f"gradients are gathered within the steps; use warmup_steps={STEPS_OF_SKETCHES} or more"
            )
        return None

    @property
    def has_readable_state(self) -> bool:
        """Whether each rank can read its part of the master weights and of the optimizer's state."""
        return self.spec.reads_state(self)

    @property
    def has_readable_moments(self) -> bool:
        """Whether each rank can read its part of Adam's moments."""
        return self.has_readable_state and self.optimizer == "adamw"

    @property
    def layout(self) -> Layout:
        return super().layout.with_world_size(self.world_size)

    def hyper_parameters(self, name: str, num_dims: int) -> HyperParameters:
        """Return the hyper-parameters of the parameter with this Hugging Face name and number of dimensions."""
        return hyper_parameters(read_groups(self.param_groups), name, num_dims, self.weight_decay, self.betas)

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches per replica and step."""
        return self.global_batch // (self.micro_batch * self.layout.data_parallel)


def _hint(word: str, known: list[str], value: object) -> str:
    """Return what to use instead of an unknown setting."""
    return hint(word, known, otherwise="megabench train --help lists all settings", value=value)


def _not_its_setting(name: str, engine: str, fields: Mapping[str, Any]) -> str:
    """Return the error message for a setting that belongs to another engine."""
    engines = engines_with(name)
    sizes = " with tp=1 and pp=1" if ENGINES_AND_PROGRAMS[engines[0]].is_data_parallel else ""
    return (
        f"{name} is a setting of the {_listed(engines)} engine{'s' * (len(engines) > 1)}, and the engine is {engine} "
        f"(tp={fields.get('tp', 1)}, pp={fields.get('pp', 1)}); add --engine {engines[0]}{sizes}, or leave it out"
    )


def _listed(words: Iterable[str]) -> str:
    """ "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
