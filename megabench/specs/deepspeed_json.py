"""Read and check a user's DeepSpeed JSON file.

Settings of the JSON file apply if the run does not set them, and must not contradict the run.
"""

from pathlib import Path
from types import NoneType
from typing import Any

from megabench import shipped
from megabench.models.mapping import largest_parameter
from megabench.precision import POLICIES
from megabench.settings.reading import ConfigError, near_matches, read_json_object
from megabench.specs.engine_spec import ResolvedRun

_RUN_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "communication_data_type",
)
_SECTIONS = (
    "zero_optimization",
    "bf16",
    "fp16",
    "data_types",
    "activation_checkpointing",
    "aio",
    "comms_logger",
    "flops_profiler",
)
_HARMLESS = (
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "prescale_gradients",
    "gradient_predivide_factor",
    "zero_allow_untested_optimizer",
)
# Sections of the JSON file that would make the run differ from other trials, with the megabench settings to use
# instead.
_ELSEWHERE = {
    "optimizer": "--optimizer, --lr, --betas, --eps and --weight-decay",
    "scheduler": "--lr, --lr-warmup and --min-lr",
}
_NUMBERS = (
    "stage",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "zero_hpz_partition_size",
)
_LARGEST_NUMBER = 10**15
_NO_MASTERS = "all engines train with masters and moments in fp32"
_REFUSED = {
    "zero_optimization": {
        "zero_quantized_weights": "it changes the trained weights",
        "zero_quantized_gradients": "it changes the gradients",
        "zero_quantized_nontrainable_weights": "it changes the trained weights",
        "stage3_module_granularity_threshold": "DeepSpeed 0.19.8 computes wrong gradients (use zero_leaf_layers)",
        "zenflow": "it updates weights with stale gradients",
    },
    "bf16": {"bf16_master_weights_and_grads": _NO_MASTERS, "bf16_optimizer_states": _NO_MASTERS},
    "fp16": {"fp16_master_weights_and_grads": _NO_MASTERS},
}


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed configuration, which is a file or the name of a shipped file, without its "auto" entries.

    Raise ConfigError if the file is not a DeepSpeed configuration, or has settings that would change the compared work.
    """
    path = shipped.find("deepspeed", path)
    content = read_json_object(path)
    for section in _SECTIONS:
        _check_section(section, content.get(section, {}), path)
    for key in content:
        if key in _ELSEWHERE:
            raise ConfigError(
                f"{path} sets {key!r}, which megabench sets for every engine; remove it and use {_ELSEWHERE[key]}"
            )
        if key not in _RUN_KEYS + _SECTIONS + _HARMLESS:
            raise ConfigError(
                f"{path} sets {key!r}, which megabench does not pass to DeepSpeed; remove it "
                f"({near_matches(key, [*_RUN_KEYS, *_SECTIONS, *_HARMLESS])})"
            )
    for section, refused in _REFUSED.items():
        for key, why in refused.items():
            if content.get(section, {}).get(key):
                raise ConfigError(f"{path} sets {section}.{key}, but {why}; remove it")
    if content.get("zero_optimization", {}).get("compute_grad_norm") is False:
        raise ConfigError(
            f"{path} sets zero_optimization.compute_grad_norm to false, but records need the norm; remove it"
        )
    return _without_auto(content)


def _check_section(name: str, section: Any, path: Path) -> None:
    """Raise ConfigError unless the values of a section have types that this package and DeepSpeed can read."""
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {name} must be an object, e.g. {{}}, not {section!r}")
    for key, value in section.items():
        if key == "enabled" and not isinstance(value, bool) and value != "auto":
            raise ConfigError(f"{path}: {name}.enabled must be true or false, not {value!r}")
        if key in _NUMBERS and value != "auto" and not (type(value) in (int, float) and 0 <= value <= _LARGEST_NUMBER):
            raise ConfigError(f"{path}: {name}.{key} must be a number from 0 to {_LARGEST_NUMBER:.0e}, not {value!r}")
        if key.startswith("offload_") and not isinstance(value, dict | NoneType):
            raise ConfigError(f"{path}: {name}.{key} must be an object, e.g. {{}}, not {value!r}")


def names_batch(content: dict[str, Any]) -> bool:
    """Return whether the JSON file sets the number of sequences per step."""
    return not content.keys().isdisjoint(("train_batch_size", "gradient_accumulation_steps"))


def settings_of_run(content: dict[str, Any], given: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings of the JSON file as RunConfig fields. Raises ConfigError if they contradict `given`."""
    enabled = [precision for precision in ("bf16", "fp16") if content.get(precision, {}).get("enabled")]
    if len(enabled) > 1:
        raise ConfigError(f"{path} enables both bf16 and fp16; enable one of them")
    said = {
        "zero_stage": content.get("zero_optimization", {}).get("stage"),
        "micro_batch": content.get("train_micro_batch_size_per_gpu"),
        "global_batch": content.get("train_batch_size"),
        "clip_grad": content.get("gradient_clipping"),
        "grad_dtype": content.get("data_types", {}).get("grad_accum_dtype"),
        "precision": enabled[0] if enabled else None,
    }
    said |= _zero_settings(content.get("zero_optimization", {}), path)
    said = {name: value for name, value in said.items() if value is not None}
    if (policy := POLICIES.get(given.get("precision", ""))) and policy.compute == said.get("precision"):
        del said["precision"]  # for DeepSpeed, a run with fp8 products is a bf16 run
    for name in given.keys() & said.keys():
        if given[name] != said[name]:
            raise ConfigError(
                f"{path} sets {name}={said[name]}, but the run sets {name}={given[name]}; change one of them"
            )
    return said


def _zero_settings(zero: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the run settings that correspond to the section zero_optimization."""
    offloaded = []
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            raise ConfigError(
                f"{path} sets zero_optimization.{key}.device={device!r}, but only cpu is supported; use cpu"
            )
        offloaded.append(device == "cpu")
    optimizer, parameters = offloaded
    if parameters and not optimizer:
        raise ConfigError(
            f"{path} offloads parameters without their optimizer; add zero_optimization.offload_optimizer"
        )
    return {
        "offload": "all" if parameters else "optimizer" if optimizer else None,
        "hpz_size": zero.get("zero_hpz_partition_size"),
        "zero_prefetch": zero.get("stage3_prefetch_bucket_size"),
        "zero_persistence": zero.get("stage3_param_persistence_threshold"),
    }


def check_deepspeed_json(content: dict[str, Any], run: ResolvedRun, zero_stage: int, path: Path) -> None:
    """Raise ConfigError if the JSON file contradicts the resolved run."""
    for precision in ("bf16", "fp16"):
        enabled = content.get(precision, {}).get("enabled")
        if enabled is not None and bool(enabled) != (run.policy.compute == precision):
            raise ConfigError(f"{path} sets {precision}.enabled={enabled}, but the run's precision is {run.precision}")
    wire = content.get("communication_data_type")
    if wire is not None and wire != run.grad_dtype:
        raise ConfigError(
            f"{path} sets communication_data_type={wire}, but gradients are {run.grad_dtype}; "
            f"use grad_dtype={wire} for both, or remove it"
        )
    bucket = content.get("zero_optimization", {}).get("reduce_bucket_size")
    if zero_stage in (1, 2) and bucket is not None and bucket < (largest := largest_parameter(run.shape)):
        raise ConfigError(
            f"{path} sets reduce_bucket_size={bucket}, but the largest gradient of {run.model} has {largest} elements, "
            f"and DeepSpeed can corrupt larger gradients on slow links; use at least {largest}, or remove it"
        )
    steps = content.get("gradient_accumulation_steps")
    if steps is not None and steps != run.num_micro_batches:
        raise ConfigError(
            f"{path} sets gradient_accumulation_steps={steps}, but global_batch={run.global_batch} is "
            f"{run.num_micro_batches} micro-batches of {run.micro_batch} on {run.layout.dp} replicas; "
            f"remove it, or change global_batch"
        )


def merge(base: dict[str, Any], winning: dict[str, Any]) -> dict[str, Any]:
    """Merge `winning` into `base` recursively. Entries of `winning` take precedence."""
    merged = dict(base)
    for key, value in winning.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


def _without_auto(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if value != "auto"
    }
