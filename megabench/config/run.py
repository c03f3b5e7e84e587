"""RunConfig: all that one run is made of, and its validation with advice."""

import hashlib
import shlex
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megabench.metrics import output_layer_cost
from megabench.models.find import find_model
from megabench.models.shape import ModelShape
from megabench.parallel.layout import Layout, divisors
from megabench.precision import POLICIES, PrecisionPolicy
from megabench.settings.field import names
from megabench.settings.reading import ConfigError, explain, literal_values
from megabench.settings.run import SETTINGS, RunSettings, hint
from megabench.specs.base import EngineSpec
from megabench.specs.deepspeed_json import check_deepspeed_json, read_deepspeed_json, settings_of_run
from megabench.specs.registry import ENGINES

POWERSGD_PLAIN_STEPS = 2  # uncompressed steps at the start, the fewest that torch's hook takes with error feedback

# The settings of version 0.1, which a trial's identity always contains. A newer setting is part of it only where it
# differs from its default, so that the identities of older studies stay the same.
_ALWAYS_IDENTIFYING = (
    "model", "num_layers", "engine", "tp", "pp", "vp", "stages", "cp", "keep_gathered", "placement", "strict_placement",
    "emulate_hosts", "zero_stage", "shard_size", "reshard_after_forward", "offload", "hpz_size", "zero_prefetch",
    "zero_persistence", "zero_leaf_layers", "powersgd_rank", "compile", "deepspeed_config", "seq_length", "micro_batch",
    "global_batch", "steps", "warmup_steps", "optimizer", "lr", "lr_warmup", "min_lr", "betas", "eps", "weight_decay",
    "clip_grad", "precision", "grad_dtype", "kernels", "recompute", "data", "tokenizer", "seed", "device", "load",
    "nan_tolerance", "world_size",
)  # fmt: skip


# settings whose values are the names in a table
_TABLES: dict[str, Mapping[str, object]] = {"engine": ENGINES, "precision": POLICIES}


class RunConfig(RunSettings):
    """All that one run is made of. Fields that default to None are filled by `resolve` from the model or the device."""

    @classmethod
    def parse(cls, fields: dict[str, Any], where: str = "") -> Self:
        """A RunConfig from untyped fields; ConfigError with near matches for unknown keys. `where` names the source."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(where + explain(error, cls, hint)) from None

    @property
    def shape(self) -> ModelShape:
        return find_model(self.model, self.num_layers)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's true and yes would count as 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise PydanticCustomError("truth", "it takes no true or false")
        return value

    @field_validator(*_TABLES)
    @classmethod
    def _is_in_its_table(cls, value: str | None, info: ValidationInfo) -> str | None:
        table = _TABLES[info.field_name or ""]
        if value is not None and value not in table:
            raise PydanticCustomError("choice", "is not known; use one of {names}", {"names": ", ".join(table)})
        return value

    @property
    def spec(self) -> EngineSpec:
        """The description of the engine."""
        return ENGINES[self.engine]

    @property
    def layout(self) -> Layout:
        """The layout without dp; `resolve` checks that it can be filled."""
        return Layout(tp=self.tp, cp=self.cp, pp=self.pp, vp=self.vp)

    @property
    def to_find(self) -> tuple[str, ...]:
        """The settings that are "auto": to be found by trying, before the run can be resolved."""
        return tuple(name for name in names(SETTINGS, searchable=True) if getattr(self, name) == "auto")

    def resolve(self, world_size: int, device: Literal["cpu", "cuda"]) -> "ResolvedConfig":
        """Fills every default and checks every rule; raises ConfigError, LayoutError or UnknownModelError."""
        if self.to_find:
            raise ConfigError(
                f"{self.to_find[0]}=auto is found by launch/pretrain.py and megabench compare; here name the value"
            )
        self._check_engine()
        run = self.with_deepspeed_json()._resolve(world_size, device)
        if self.deepspeed_config:
            check_deepspeed_json(read_deepspeed_json(self.deepspeed_config), run, self.deepspeed_config)
        return run

    def with_deepspeed_json(self) -> "RunConfig":
        """This configuration with what its DeepSpeed JSON says where it is silent; ConfigError where they disagree."""
        if not self.deepspeed_config:
            return self
        content = read_deepspeed_json(self.deepspeed_config)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        said = settings_of_run(content, given, self.deepspeed_config)
        return type(self).parse(self.model_dump(exclude_unset=True) | said, f"{self.deepspeed_config}: ")

    def _resolve(self, world_size: int, device: Literal["cpu", "cuda"]) -> "ResolvedConfig":
        shape = self.shape
        self._check_model_fits(shape)
        self._check_placement(world_size)
        if max(self.betas) >= 1:
            raise ConfigError(f"betas={self.betas} must lie below 1, e.g. 0.9 0.95")
        precision = self.precision or ("bf16" if device == "cuda" else "fp32")
        policy = POLICIES[precision]
        if policy.needs_gpu and device == "cpu":
            others = " or ".join(name for name, other in POLICIES.items() if not other.needs_gpu)
            raise ConfigError(f"precision={precision} needs a GPU; use {others} on CPU")
        if self.grad_dtype == "bf16" and self.powersgd_rank:
            raise ConfigError("PowerSGD sends fp32 factors of its own; use grad_dtype=fp32, or leave powersgd_rank out")
        for name in ("shard_size", "hpz_size"):
            if (size := getattr(self, name)) and world_size % size:
                raise ConfigError(
                    f"{name}={size} does not divide the {world_size} ranks; use one of {divisors(world_size)}"
                )
        self.spec.check(self)
        if self.optimizer == "adafactor" and not self.spec.holds_matrices(self):
            where = self.spec.mode(self) or f"the {self.engine} engine"
            raise ConfigError(
                f"optimizer=adafactor needs whole matrices on every rank, and {where} cuts them; use --engine ddp, or "
                f"optimizer=adamw"
            )
        if self.grad_dtype not in policy.grad_dtypes:
            others = " or ".join(name for name, other in POLICIES.items() if self.grad_dtype in other.grad_dtypes)
            raise ConfigError(
                f"grad_dtype={self.grad_dtype} goes with precision={others} only, not {precision}; use grad_dtype=fp32"
            )
        if self.zero_stage == 0 and precision != self.grad_dtype:
            raise ConfigError(
                f"DeepSpeed's zero_stage=0 accumulates {precision} gradients in {precision} alone, and "
                f"grad_dtype={self.grad_dtype}; use zero_stage=1, or precision=fp32"
            )
        self._check_saving(precision)
        lr = self.lr or shape.learning_rate
        min_lr = lr / 10 if self.min_lr is None else self.min_lr
        if min_lr > lr:
            raise ConfigError(f"min_lr={min_lr:g} is above lr={lr:g}; use a min_lr between 0 and lr")
        filled = {
            "seq_length": self.seq_length or shape.seq_length,
            "micro_batch": self.micro_batch or shape.micro_batch,
            "global_batch": self.global_batch or shape.global_batch,
            "precision": precision,
            "lr": lr,
            "min_lr": min_lr,
            "lr_warmup": shape.lr_warmup if self.lr_warmup is None else self.lr_warmup,
            "device": device,
            "tensorboard": self.tensorboard or (self.out / "tensorboard" if self.out else None),
            **self.spec.complete(self),
        }
        self.layout.with_world_size(world_size)
        run = ResolvedConfig.model_validate(self.model_dump() | filled | {"world_size": world_size})
        run.layout.check_model(shape, run.seq_length)
        run.layout.check_batch(run.global_batch, run.micro_batch)
        return run

    def _check_model_fits(self, shape: ModelShape) -> None:
        if self.spec.needs_blocks and not shape.table.has_parallel_blocks:
            raise ConfigError(
                f"{shape.why_no_blocks}; the megatron engine has no parallel blocks for it, and deepspeed, fsdp and "
                f"ddp train it: add --engine deepspeed, or take a Llama, Mistral or Qwen model"
            )
        length = self.seq_length or shape.seq_length
        if shape.table.positions == "learned" and shape.num_positions and length > shape.num_positions:
            raise ConfigError(
                f"seq_length={length} is more than the {shape.num_positions} positions that {self.model} has learned; "
                f"use a seq_length up to that"
            )

    def _check_placement(self, world_size: int) -> None:
        if self.strict_placement and self.placement == "spread-tp":
            raise ConfigError("strict_placement keeps TP inside NVLink domains, and placement=spread-tp puts it across")
        if self.emulate_hosts and world_size % self.emulate_hosts:
            raise ConfigError(
                f"emulate_hosts={self.emulate_hosts} does not divide the {world_size} ranks; "
                f"use one of {divisors(world_size)}"
            )

    def _check_saving(self, precision: str) -> None:
        for name in ("save_every", "keep"):
            if (value := getattr(self, name)) is not None and self.save is None:
                raise ConfigError(f"{name}={value} needs a directory to save to; add --save DIR, or leave it out")
        if (self.save or self.load) and self.powersgd_rank:
            raise ConfigError(
                f"checkpoints do not hold what PowerSGD has left unsent; leave powersgd_rank={self.powersgd_rank} out, "
                f"or save and load"
            )
        if (self.save or self.load) and self.zero_stage == 0 and self.optimizer == "adafactor":
            raise ConfigError("checkpoints of zero_stage=0 do not hold Adafactor's state; use --engine ddp")
        if (self.save or self.load) and self.zero_stage == 0 and POLICIES[precision].has_masters:
            raise ConfigError(
                f"checkpoints of zero_stage=0 hold fp32 masters, which DeepSpeed keeps out of reach in {precision}; "
                f"use zero_stage=1, or precision=fp32"
            )

    def _check_engine(self) -> None:
        for name, about in SETTINGS.items():
            engines = about.engines
            is_given = getattr(self, name) != RunConfig.model_fields[name].default
            if engines and self.engine not in engines and is_given:
                sizes = " with tp=1 and pp=1" if ENGINES[engines[0]].is_data_parallel else ""
                raise ConfigError(
                    f"{name} is a setting of the {' and '.join(engines)} engine{'s' * (len(engines) > 1)}, and the "
                    f"engine is {self.engine} (tp={self.tp}, pp={self.pp}); add --engine {engines[0]}{sizes}, or "
                    f"leave it out"
                )
        mode = self.spec.mode(self)
        engine = f"{mode} of the {self.engine} engine" if mode else f"the {self.engine} engine"
        for axis in ("tp", "pp", "vp", "cp"):
            if axis not in self.spec.axes and (size := getattr(self, axis)) > 1:
                raise ConfigError(
                    f"{engine} is data-parallel alone, but "
                    f"{axis}={size}; use {axis}=1, or --engine megatron for {axis}={size}"
                )
        if self.recompute not in self.spec.recompute:
            raise ConfigError(
                f"recompute={self.recompute} is the megatron engine's; use none or full with {self.engine}"
            )

    def flags(self) -> list[str]:
        """The command-line flags that reproduce this configuration: those that differ from the defaults."""
        words: list[str] = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in RunConfig.model_fields and value != field.default and value is not None:
                values = () if isinstance(value, bool) else value if isinstance(value, tuple) else (value,)
                words += [f"--{'no-' * (value is False)}{name.replace('_', '-')}", *map(str, values)]
        return words

    def command(self, world_size: int, env: Mapping[str, str] | None = None) -> str:
        """What a person types to run this on one machine, with these environment variables."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]
        words = ["torchrun", "--nproc-per-node", str(world_size), "launch/pretrain.py", *self.flags()]
        return " ".join([*variables, shlex.join(words)])

    def identity(self, **more: object) -> str:
        """Hash of all settings that affect the result, and of `more`. Output paths and monitoring are left out."""
        aside = {*names(SETTINGS, role="output"), *names(SETTINGS, role="watch")}
        newer = {name for name in SETTINGS.keys() - _ALWAYS_IDENTIFYING if self._is_default(name)}
        fields = self.model_dump(mode="json", exclude=aside | newer) | more
        if self.deepspeed_config:
            fields["deepspeed_config"] = read_deepspeed_json(self.deepspeed_config)
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]

    def _is_default(self, name: str) -> bool:
        return bool(getattr(self, name) == RunConfig.model_fields[name].default)


class ResolvedConfig(RunConfig):
    """A RunConfig whose every field is filled and checked for `world_size` ranks on `device`."""

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
    def can_be_saved(self) -> bool:
        """Whether the engine's training state can be read; DeepSpeed keeps ZeRO-0's masters out of reach."""
        return self.zero_stage != 0 or (not self.policy.has_masters and self.optimizer != "adafactor")

    @property
    def layout(self) -> Layout:
        return super().layout.with_world_size(self.world_size)

    @property
    def chunk_layers(self) -> list[list[range]]:
        """Layer numbers of every model chunk, as [stage][chunk]."""
        cost = output_layer_cost(self.shape, self.seq_length) if self.stages == "balanced" else 0.0
        return self.layout.chunk_layers(self.shape.num_layers, cost)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one replica and step."""
        return self.global_batch // (self.micro_batch * self.layout.data_parallel)


def choices_of(name: str) -> tuple[Any, ...]:
    """The values that a setting may have; empty if they cannot be listed."""
    return tuple(_TABLES.get(name, ())) or literal_values(RunConfig.model_fields[name].annotation)
