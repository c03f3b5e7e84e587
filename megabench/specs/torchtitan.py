"""The program torchtitan: torchtitan's own training loop, with the TOML file that its users have."""

import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megabench import shipped
from megabench.parallel.layout import Layout
from megabench.record import Fp8Work
from megabench.settings.reading import ConfigError, read_text
from megabench.settings.run_settings import RunSettings
from megabench.settings.setting import EngineSettings, setting
from megabench.specs.engine_spec import EngineSpec, Options, ResolvedRun
from megabench.specs.program_files import check_same

Config = Mapping[str, Any]  # the content of a TOML file of torchtitan: its sections by name

_VERSION = "0.2.2"  # the newest release of torchtitan for torch 2.11
# Settings of torchtitan that are settings of a run (torchtitan/config/job_config.py)
_SETTINGS = {
    "training.seq_len": "seq_length",
    "training.steps": "steps",
    "training.max_norm": "clip_grad",
    "training.global_batch_size": "global_batch",
    "optimizer.lr": "lr",
    "optimizer.eps": "eps",
    "optimizer.weight_decay": "weight_decay",
    "lr_scheduler.warmup_steps": "lr_warmup",
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.context_parallel_degree": "cp",
    "activation_checkpoint.mode": "recompute",
    "debug.seed": "seed",
}
# A measured run sets these itself: it reads the study's data, logs every step, and neither saves nor evaluates.
REPLACED = frozenset(
    {"job", "profiling", "metrics", "checkpoint", "validation", "lr_scheduler", "model.name", "model.flavor"}
    | {"model.hf_assets_path", "model.tokenizer_path", "training.dataset", "training.dataset_path"}
)
_FLOAT8 = "quantize.linear.float8"
_REPLICAS = "parallelism.data_parallel_replicate_degree"
_REFUSED = {
    "experimental.custom_import": ("", "runs no other code here"),
    "training.dtype": ("float32", "has no fp32 weights then, which the runs to compare with have"),
    "optimizer.name": ("AdamW", "is compared with AdamW"),
    "optimizer.early_step_in_backward": (False, "does not clip then"),
    "parallelism.expert_parallel_degree": (1, "trains a model without experts"),
    "fault_tolerance.enable": (False, "trains without torchft"),
}


class TorchtitanSettings(EngineSettings):
    torchtitan_config: Path | None = setting(None, "Engine and layout", "option", "free", label="own TOML")
    """A TOML file of torchtitan, or the name of a shipped one (compile, float8)."""


class Torchtitan(EngineSpec):
    name = "torchtitan"
    title = "torchtitan"
    summary = "torchtitan's Llama 3 in its own loop, with FSDP2, HSDP, TP, PP, CP and float8"
    implementation = "megabench.programs.torchtitan:Torchtitan"
    sharding_stage = 3
    settings = TorchtitanSettings
    axes = frozenset({"tp", "pp", "cp", "dp"})
    recompute = frozenset({"none", "selective", "full"})
    optimizers = frozenset({"adamw"})
    wants_queues = True

    def read_file(self, run: RunSettings, given: Mapping[str, Any]) -> Mapping[str, Any]:
        path = TorchtitanSettings.of(run).torchtitan_config
        return check_same(path, settings_of(_content(path) or {}, path, run.pp), given)

    def check(self, run: ResolvedRun) -> None:
        if (found := _installed()) != _VERSION:
            raise ConfigError(
                f"megabench runs torchtitan {_VERSION}, and {found or 'none'} is installed; run pip install "
                f"'megabench[torchtitan]'"
            )
        path = TorchtitanSettings.of(run).torchtitan_config
        content = _content(path) or {}
        _check_model(run)
        _check_layout(run, content)
        for name, (expected, why) in _REFUSED.items():
            if value(content, name, expected) != expected:
                raise ConfigError(f"{path} sets {name}={value(content, name)}, but torchtitan {why}; remove it")
        if run.policy.compute == "fp16":
            raise ConfigError("torchtitan has no precision=fp16; use bf16, fp8 or fp32")
        if run.policy.has_fp8_products != has_float8(content):
            raise ConfigError(
                f"torchtitan computes in fp8 if its TOML file has the converter {_FLOAT8}; use "
                f"torchtitan_config=float8 and precision=fp8, or neither"
            )
        if run.num_layers_at_start_in_bf16 or run.num_layers_at_end_in_bf16:
            raise ConfigError(
                f"torchtitan keeps layers in bf16 by {_FLOAT8}.filter_fqns; omit num_layers_at_start_in_bf16 and "
                f"num_layers_at_end_in_bf16"
            )
        if not run.clip_grad:
            raise ConfigError("torchtitan always clips; use a large clip_grad, e.g. 1e9")

    def why_not_saved(self, run: ResolvedRun) -> str | None:
        return "torchtitan is measured and saves no checkpoints here; omit save and load, or train with an engine"

    def other_work(self, run: ResolvedRun) -> Mapping[str, Any]:
        other: dict[str, Any] = {} if run.grad_dtype == "fp32" else {"grad_dtype": "fp32"}
        if run.fp8_recipe:
            content = _content(TorchtitanSettings.of(run).torchtitan_config) or {}
            left_out = value(content, f"{_FLOAT8}.filter_fqns", [])
            words = [value(content, f"{_FLOAT8}.recipe_name", "tensorwise"), "of torchao"]
            words += [f"without {' and '.join(sorted(left_out))}"] if left_out else []
            other["fp8"] = Fp8Work(recipe=" ".join(words))
        return other

    def reads_state(self, run: ResolvedRun) -> bool:
        return True

    def mode(self, options: Options) -> str:
        content = _content(options.get("torchtitan_config")) or {}
        replicas = degree(content, _REPLICAS)
        words = [f"{replicas} replicas" if replicas > 1 else "FSDP2"]
        words += ["async TP"] * bool(value(content, "parallelism.enable_async_tensor_parallel"))
        words += ["compiled"] * compiles(content, "model")
        return ", ".join(words)

    def recorded(self, options: Options) -> Mapping[str, Any]:
        return {"torchtitan_config": _content(options.get("torchtitan_config"))}


def value(content: Config, name: str, default: Any = None) -> Any:
    """Return the value of a setting such as "training.seq_len", or `default` if the file does not have it."""
    found: Any = content
    for part in name.split("."):
        if not isinstance(found, Mapping):
            raise ConfigError(f"{name} in the TOML file of torchtitan is not in a section, e.g. [{name.split('.')[0]}]")
        found = found.get(part)
        if found is None:
            return default
    return found


def without_replaced(content: Config) -> dict[str, Any]:
    """Return the sections without the settings that a measured run sets itself."""
    kept = {}
    for section, settings in content.items():
        if section in REPLACED:
            continue
        given = settings.items() if isinstance(settings, Mapping) else ()
        kept[section] = {name: found for name, found in given if f"{section}.{name}" not in REPLACED}
    return kept


def degree(content: Config, name: str, default: int = 1) -> int:
    """Return a number of ranks, micro-batches or sequences: a whole number above 0. Raises ConfigError."""
    found = value(content, name, default)
    if not isinstance(found, int) or isinstance(found, bool) or (found < 1 and found != default):
        raise ConfigError(f"{name}={found!r} in the TOML file of torchtitan must be a whole number above 0")
    return found


def has_float8(content: Config) -> bool:
    """Return whether the file selects fp8 products. Raises ConfigError for another conversion of the model."""
    converters = value(content, "model.converters", [])
    if converters not in ([], [_FLOAT8]):
        raise ConfigError(f'model.converters={converters!r} is other work; use ["{_FLOAT8}"], or omit it')
    return bool(converters)


def compiles(content: Config, component: str) -> bool:
    """Return whether torch.compile fuses the operations of a component, "model" or "loss"."""
    is_fused = bool(value(content, "compile.enable")) and value(content, "compile.backend", "inductor") == "inductor"
    return is_fused and component in value(content, "compile.components", ["model", "loss"])


def is_ddp(layout: Layout, content: Config) -> bool:
    """Return whether torchtitan uses DDP: replicas without shards, and without another parallelism."""
    replicas = degree(content, _REPLICAS)
    return replicas > 1 and replicas == layout.world_size


def batch_of_pass(run: ResolvedRun, content: Config) -> int:
    """Return the sequences of a data-parallel rank in one pass forward and backward (training.local_batch_size).

    A pipeline splits them into micro-batches. If the file does not say how many, one pass has all of them.
    """
    if run.layout.pp == 1:
        return run.micro_batch
    return degree(content, "training.local_batch_size", run.micro_batch * run.num_micro_batches)


def settings_of(content: Config, path: Path | None, pp: int) -> dict[str, Any]:
    """Return the settings of a run that a TOML file of torchtitan contains. Raises ConfigError.

    `pp` is that of the run. In a pipeline, the file's local_batch_size is not the micro-batch.
    """
    said = {run: found for name, run in _SETTINGS.items() if (found := value(content, name)) is not None}
    if said.get("global_batch") == -1:
        del said["global_batch"]  # torchtitan's default
    size = "training.local_batch_size"
    if max(pp, degree(content, "parallelism.pipeline_parallel_degree")) > 1:
        size = "parallelism.pipeline_parallel_microbatch_size"
    if (micro_batch := value(content, size)) is not None:
        said["micro_batch"] = micro_batch
    betas = value(content, "optimizer.beta1"), value(content, "optimizer.beta2")
    if betas != (None, None):
        said["betas"] = (betas[0] or 0.9, betas[1] or 0.95)
    if said.get("recompute") == "memory_budget":
        raise ConfigError(f"{path} sets activation_checkpoint.mode=memory_budget; use none, selective or full")
    dtype = value(content, "training.mixed_precision_param")
    if has_float8(content):
        said["precision"] = "fp8"
    elif dtype:
        said["precision"] = {"bfloat16": "bf16", "float32": "fp32"}.get(dtype, dtype)
    return said


def _check_model(run: ResolvedRun) -> None:
    """Raise ConfigError for a model that torchtitan's Llama 3 cannot express."""
    shape = run.shape
    why = None
    if shape.family not in ("llama", "mistral"):
        why = f"trains Llama, and {shape.name} is of the family {shape.family}"
    elif shape.tied_embeddings:
        why = f"does not tie the embeddings of Llama, which {shape.name} does"
    elif shape.head_dim * shape.num_heads != shape.hidden_size:
        why = f"divides the hidden size by the heads, and {shape.name} has other heads"
    if why:
        raise ConfigError(f"torchtitan {why}; use another model, or an engine")


def _check_layout(run: ResolvedRun, content: Config) -> None:
    """Raise ConfigError for a layout that torchtitan refuses, or in which it ignores the precision."""
    layout = run.layout
    replicas, shards = degree(content, _REPLICAS), degree(content, "parallelism.data_parallel_shard_degree", -1)
    if layout.data_parallel % replicas or shards not in (-1, layout.data_parallel // replicas):
        raise ConfigError(
            f"{_REPLICAS}={replicas} and data_parallel_shard_degree={shards} do not fit the {layout.data_parallel} "
            f"data-parallel ranks of {layout}; omit data_parallel_shard_degree, and use a number of replicas that "
            f"divides them"
        )
    is_sharded = layout.data_parallel > replicas or layout.cp > 1
    has_other_axes = layout.tp * layout.pp > 1
    if has_other_axes and replicas > 1 and not is_sharded:
        raise ConfigError(f"torchtitan has no DDP beside TP or PP; omit {_REPLICAS}, or use fewer replicas")
    if has_other_axes and not is_sharded and run.policy.compute != "fp32":
        raise ConfigError(
            f"torchtitan computes in fp32 with TP or PP but without FSDP; use dp=2 or more, or precision=fp32, not "
            f"precision={run.precision} with {layout}"
        )
    divisor = 2 * layout.tp * layout.cp
    if run.seq_length % divisor:
        raise ConfigError(
            f"torchtitan divides the sequence by 2·tp·cp = {divisor}; use a multiple, not seq_length={run.seq_length}"
        )
    size = batch_of_pass(run, content)
    if size % run.micro_batch or (run.micro_batch * run.num_micro_batches) % size:
        raise ConfigError(
            f"training.local_batch_size={size} must be a multiple of micro_batch={run.micro_batch} and divide the "
            f"{run.micro_batch * run.num_micro_batches} sequences of a data-parallel rank; use another, or omit it"
        )


def _installed() -> str | None:
    """Return the version of the installed torchtitan, or None."""
    try:
        return version("torchtitan")
    except PackageNotFoundError:
        return None


def _content(given: Any) -> dict[str, Any] | None:
    """Return the content of a TOML file, from its path or name (in settings) or its content (in records)."""
    if not isinstance(given, str | Path):
        return given
    path = shipped.find("torchtitan", given)
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
