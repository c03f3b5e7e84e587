"""RunConfig: all that one run is made of, and its validation with advice. Loads no torch."""

import hashlib
import json
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from megabench import UserError
from megabench.models.catalog import ModelShape, get_model
from megabench.parallel.layout import Layout

EngineName = Literal["megatron", "deepspeed"]
Precision = Literal["bf16", "fp16", "fp32"]
Beta = PositiveFloat  # checked to be below 1 in resolve()


class ConfigError(UserError):
    """A setting that is wrong or contradicts another."""


class RunConfig(BaseModel):
    """Every setting of a run. Fields that default to None are filled by `resolve` from the model or the device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("llama3-8b", description="Model: a name of the catalogue.")
    num_layers: PositiveInt | None = Field(None, description="Cut or grow the model to this many layers.")
    engine: EngineName = Field("megatron", description="How a step runs.")
    tp: PositiveInt = Field(1, description="Tensor-parallel size; sequence parallelism comes with it.")
    pp: PositiveInt = Field(1, description="Pipeline stages.")
    vp: PositiveInt = Field(1, description="Model chunks per pipeline stage (interleaved schedule).")
    cp: PositiveInt = Field(1, description="Context-parallel size.")
    zero_stage: Literal[0, 1, 2, 3] | None = Field(None, description="ZeRO stage of the deepspeed engine [default: 3].")
    deepspeed_config: Path | None = Field(None, description="Your own DeepSpeed JSON; its settings win.")
    seq_length: PositiveInt | None = Field(None, description="Tokens of a sequence [default: the model's].")
    micro_batch: PositiveInt | None = Field(
        None, description="Sequences of one forward pass and replica [default: the model's]."
    )
    global_batch: PositiveInt | None = Field(
        None, description="Sequences of one optimizer step [default: the model's]."
    )
    steps: PositiveInt = Field(100, description="Optimizer steps in all, warm-up steps included.")
    warmup_steps: NonNegativeInt = Field(5, description="Steps before timing starts; in no reported figure.")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="Optimizer (SGD without momentum).")
    lr: PositiveFloat | None = Field(None, description="Peak learning rate [default: the model's].")
    lr_warmup: NonNegativeInt | None = Field(None, description="Steps of linear warm-up [default: the model's].")
    min_lr: NonNegativeFloat | None = Field(
        None, description="Learning rate at the end of the cosine [default: a tenth of lr]."
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's betas.")
    eps: PositiveFloat = Field(1e-8, description="AdamW's epsilon.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Weight decay of matrices; vectors have none.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Clip the global gradient norm to this; 0 is off.")
    precision: Precision | None = Field(None, description="Training dtype [default: bf16 on GPU, fp32 on CPU].")
    grad_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Dtype in which gradients are accumulated and reduced, for every engine."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="Activations computed again in backward: none, attention alone, or whole layers."
    )
    data: str = Field(
        "stdlib",
        description="stdlib, synthetic, a .txt/.jsonl/.parquet file, or the prefix of a .bin/.idx token file.",
    )
    tokenizer: str = Field("bytes", description="bytes, or a Hugging Face tokenizer directory.")
    seed: NonNegativeInt = Field(1234, description="Seed of the initial weights and of the order of the data.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to run.")
    tensorboard: Path | None = Field(None, description="TensorBoard directory [default: OUT/tensorboard].")
    out: Path | None = Field(None, description="Directory for record.json and TensorBoard scalars.")

    @classmethod
    def parse(cls, fields: dict[str, Any], where: str = "") -> Self:
        """A RunConfig from untyped fields; ConfigError with near matches for unknown keys. `where` names the source."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(where + explain(error, cls)) from None

    @classmethod
    def from_yaml(cls, path: Path) -> dict[str, Any]:
        """The fields of a YAML file, not yet validated, so that flags may override them."""
        return read_yaml_mapping(path)

    @property
    def shape(self) -> ModelShape:
        shape = get_model(self.model)
        return shape.with_layers(self.num_layers) if self.num_layers else shape

    @property
    def layout(self) -> Layout:
        """The layout without dp; `resolve` checks that it can be filled."""
        return Layout(tp=self.tp, cp=self.cp, pp=self.pp, vp=self.vp)

    def resolve(self, world_size: int, device: Literal["cpu", "cuda"]) -> "ResolvedConfig":
        """Fills every default and checks every rule; raises ConfigError, LayoutError or UnknownModelError."""
        if self.engine == "deepspeed":
            self._check_deepspeed()
            if self.deepspeed_config:
                return self._with_deepspeed_json()._resolve(world_size, device)
        elif self.zero_stage is not None or self.deepspeed_config is not None:
            setting = "zero_stage" if self.zero_stage is not None else "deepspeed_config"
            raise ConfigError(
                f"{setting} is a setting of the deepspeed engine, and the engine is megatron (tp={self.tp}, "
                f"pp={self.pp}); add --engine deepspeed with tp=1 and pp=1, or leave it out"
            )
        return self._resolve(world_size, device)

    def _resolve(self, world_size: int, device: Literal["cpu", "cuda"]) -> "ResolvedConfig":
        shape = self.shape
        if max(self.betas) >= 1:
            raise ConfigError(f"betas={self.betas} must lie below 1, e.g. 0.9 0.95")
        precision = self.precision or ("bf16" if device == "cuda" else "fp32")
        if precision == "fp16" and device == "cpu":
            raise ConfigError("precision=fp16 needs a GPU; use bf16 or fp32 on CPU")
        if self.grad_dtype == "bf16" and precision != "bf16":
            raise ConfigError(f"grad_dtype=bf16 goes with precision=bf16 only, not {precision}; use grad_dtype=fp32")
        if self.zero_stage == 0 and precision != self.grad_dtype:
            raise ConfigError(
                f"DeepSpeed's zero_stage=0 accumulates {precision} gradients in {precision} alone, and "
                f"grad_dtype={self.grad_dtype}; use zero_stage=1, or precision=fp32"
            )
        lr = self.lr or shape.learning_rate
        min_lr = lr / 10 if self.min_lr is None else self.min_lr
        if min_lr > lr:
            raise ConfigError(f"min_lr={min_lr:g} is above lr={lr:g}; use a min_lr between 0 and lr")
        filled = {
            "zero_stage": 3 if self.engine == "deepspeed" and self.zero_stage is None else self.zero_stage,
            "seq_length": self.seq_length or shape.seq_length,
            "micro_batch": self.micro_batch or shape.micro_batch,
            "global_batch": self.global_batch or shape.global_batch,
            "precision": precision,
            "lr": lr,
            "min_lr": min_lr,
            "lr_warmup": shape.lr_warmup if self.lr_warmup is None else self.lr_warmup,
            "device": device,
            "tensorboard": self.tensorboard or (self.out / "tensorboard" if self.out else None),
        }
        self.layout.with_world_size(world_size)
        run = ResolvedConfig.model_validate(self.model_dump() | filled | {"world_size": world_size})
        run.layout.check_model(shape, run.seq_length)
        run.layout.check_batch(run.global_batch, run.micro_batch)
        if self.deepspeed_config:
            said = read_deepspeed_json(self.deepspeed_config).get("gradient_accumulation_steps", run.num_micro_batches)
            if said != run.num_micro_batches:
                raise ConfigError(
                    f"{self.deepspeed_config} says gradient_accumulation_steps={said}, but global_batch="
                    f"{run.global_batch} is {run.num_micro_batches} micro-batches of {run.micro_batch} on "
                    f"{run.layout.dp} replicas; leave it out, or change global_batch"
                )
        return run

    def _check_deepspeed(self) -> None:
        for axis in ("tp", "pp", "vp", "cp"):
            if (size := getattr(self, axis)) > 1:
                stage = 3 if self.zero_stage is None else self.zero_stage
                raise ConfigError(
                    f"zero_stage={stage} of the deepspeed engine shards over data-parallel ranks alone, but "
                    f"{axis}={size}; use {axis}=1, or --engine megatron for {axis}={size}"
                )
        if self.recompute == "selective":
            raise ConfigError("recompute=selective is the megatron engine's; use none or full with deepspeed")

    def _with_deepspeed_json(self) -> Self:
        """Takes what the user's DeepSpeed JSON says of the run; ConfigError where a flag says otherwise."""
        assert self.deepspeed_config is not None
        content = read_deepspeed_json(self.deepspeed_config)
        for section in ("optimizer", "scheduler"):
            if section in content:
                raise ConfigError(
                    f"{self.deepspeed_config} sets {section!r}, which megabench sets for every engine alike; "
                    f"remove it there and use --optimizer, --lr, --lr-warmup and --min-lr"
                )
        said = {
            "zero_stage": content.get("zero_optimization", {}).get("stage"),
            "micro_batch": content.get("train_micro_batch_size_per_gpu"),
            "global_batch": content.get("train_batch_size"),
            "clip_grad": content.get("gradient_clipping"),
            "grad_dtype": content.get("data_types", {}).get("grad_accum_dtype"),
            "precision": next((p for p in ("bf16", "fp16") if content.get(p, {}).get("enabled") is True), None),
        }
        said = {name: value for name, value in said.items() if value is not None}
        for name in self.model_fields_set & said.keys():
            if getattr(self, name) != said[name]:
                raise ConfigError(
                    f"{self.deepspeed_config} says {name}={said[name]}, but the run says {name}={getattr(self, name)}; "
                    f"change one of them"
                )
        return type(self).parse(self.model_dump(exclude_unset=True) | said, where=f"{self.deepspeed_config}: ")

    def flags(self) -> list[str]:
        """The command-line flags that reproduce this configuration: those that differ from the defaults."""
        words: list[str] = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in RunConfig.model_fields and value != field.default and value is not None:
                values = value if isinstance(value, tuple) else (value,)
                words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return words

    def command(self, world_size: int) -> str:
        """What a person types to run this on one machine."""
        words = ["torchrun", "--nproc-per-node", str(world_size), "launch/pretrain.py", *self.flags()]
        return shlex.join(words)

    def identity(self, **more: object) -> str:
        """Hash of all that shapes the run (where it writes aside), together with `more`."""
        fields = self.model_dump(mode="json", exclude={"out", "tensorboard"}) | more
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


class ResolvedConfig(RunConfig):
    """A RunConfig whose every field is filled and checked for `world_size` ranks on `device`."""

    world_size: PositiveInt
    seq_length: PositiveInt
    micro_batch: PositiveInt
    global_batch: PositiveInt
    lr: PositiveFloat
    lr_warmup: NonNegativeInt
    min_lr: NonNegativeFloat
    precision: Precision
    device: Literal["cpu", "cuda"]

    @property
    def layout(self) -> Layout:
        return super().layout.with_world_size(self.world_size)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one replica and step."""
        return self.global_batch // (self.micro_batch * self.layout.data_parallel)


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; ConfigError when it cannot be read or holds something else."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, e.g. 'tp: 2', not {type(content).__name__}")
    return content


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """A DeepSpeed configuration without its "auto" entries, which leave the choice to the program that reads it."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a DeepSpeed JSON file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return _without_auto(content)


def _without_auto(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if value != "auto"
    }


def merge(base: dict[str, Any], winning: dict[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `winning` over it, mapping by mapping."""
    merged = dict(base)
    for key, value in winning.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


def near_matches(word: str, known: list[str]) -> str:
    """ "; did you mean X?", or the whole list when nothing is near."""
    near = get_close_matches(word, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"


def literal_values(annotation: Any) -> tuple[Any, ...]:
    """The choices of a Literal, or of the Literal in `Literal[…] | None`; empty for any other type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((get_args(arm) for arm in get_args(annotation) if get_origin(arm) is Literal), ())


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a ValidationError as one sentence with a way out."""
    problem = error.errors()[0]
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name!r}; {near_matches(name, list(model.model_fields))}"
    field = model.model_fields.get(name)
    if problem["type"] == "literal_error" and field:
        choices = ", ".join(map(str, literal_values(field.annotation)))
        return f"{name}={problem['input']!r} is not known; use one of {choices}"
    return f"{name}={problem['input']!r} is not valid: {problem['msg'][0].lower()}{problem['msg'][1:]}"
