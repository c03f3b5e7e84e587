"""Read and check a user's DeepSpeed JSON file.

Settings of the JSON file apply if the run does not set them, and must not contradict the run.
"""

import math
from pathlib import Path
from types import NoneType
from typing import Any

from megabench import shipped
from megabench.models.mapping import largest_parameter
from megabench.precision import INITIAL_LOSS_SCALE, LOSS_SCALE_HYSTERESIS, LOSS_SCALE_WINDOW, POLICIES
from megabench.settings.reading import ConfigError, near_matches, read_json_object
from megabench.specs.deepspeed_keys import KEYS, Refused, Renamed, Section, Value
from megabench.specs.engine_spec import ResolvedRun

_OF_STAGE_3 = {"zero_prefetch": "stage3_prefetch_bucket_size", "zero_persistence": "stage3_param_persistence_threshold"}
_KEPT_WEIGHTS = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
_PRESCALING = {"prescale_gradients": False, "gradient_predivide_factor": 1}
_LOSS_SCALE = {
    "loss_scale": 0,
    "initial_scale_power": int(math.log2(INITIAL_LOSS_SCALE)),
    "loss_scale_window": LOSS_SCALE_WINDOW,
    "hysteresis": LOSS_SCALE_HYSTERESIS,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed configuration, which is a file or the name of a shipped file, without its "auto" entries.

    Deprecated keys and other names of a key are replaced by the key itself. Raise ConfigError if the file is not a
    DeepSpeed configuration, or has a key that `deepspeed_keys` refuses or does not contain.
    """
    path = shipped.find("deepspeed", path)
    return _read_section(read_json_object(path), KEYS, path, "")


def _read_section(content: dict[str, Any], rules: Section, path: Path, prefix: str) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, value in content.items():
        name, rule = key, rules.get(key)
        if rule is None:
            raise ConfigError(
                f"{path} sets {prefix}{key}, which is no key of DeepSpeed; "
                f"{near_matches(key, list(rules), 'remove it, or correct its name')}"
            )
        if value == "auto":
            continue
        if isinstance(rule, Renamed):
            if rule.to in content:
                raise ConfigError(f"{path} sets {prefix}{key} and {prefix}{rule.to}, which are the same; remove {key}")
            if rule.kind:
                _check_value(value, rule.kind, path, prefix + key)
            name, value, rule = rule.to, rule.convert(value), rules[rule.to]
            assert not isinstance(rule, Renamed)
        if isinstance(rule, Refused):
            if not rule.accepts(value):
                raise ConfigError(f"{path} sets {prefix}{key}, but {rule.why}; {rule.instead}")
        elif isinstance(rule, Value):
            _check_value(value, rule, path, prefix + key)
            read[name] = rule.convert(value)
        elif isinstance(value, dict | NoneType):
            read[name] = _read_section(value or {}, rule, path, f"{prefix}{key}.")
        else:
            raise ConfigError(f"{path}: {prefix}{key} must be an object, e.g. {{}}, not {value!r}")
    return read


def _check_value(value: Any, rule: Value, path: Path, where: str) -> None:
    if not rule.is_valid(value):
        raise ConfigError(f"{path}: {where} must be {rule.expected}, not {value!r}")


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
    if said["grad_dtype"] == "fp16":
        raise ConfigError(
            f"{path} sets data_types.grad_accum_dtype=fp16, but no engine accumulates in fp16; use fp32 or bf16"
        )
    said |= _zero_settings(content.get("zero_optimization", {}), given, path)
    said = {name: value for name, value in said.items() if value is not None}
    if (policy := POLICIES.get(given.get("precision", ""))) and policy.compute == said.get("precision"):
        del said["precision"]  # for DeepSpeed, a run with fp8 products is a bf16 run
    for name in given.keys() & said.keys():
        if given[name] != said[name]:
            raise ConfigError(
                f"{path} sets {name}={said[name]}, but the run sets {name}={given[name]}; change one of them"
            )
    return said


def _zero_settings(zero: dict[str, Any], given: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the run settings that correspond to the section zero_optimization."""
    optimizer, parameters = (
        zero[key].get("device", "none") == "cpu" if key in zero else None
        for key in ("offload_optimizer", "offload_param")
    )
    if parameters and not (optimizer or (optimizer is None and given.get("offload") == "all")):
        raise ConfigError(
            f"{path} offloads parameters without their optimizer; add zero_optimization.offload_optimizer"
        )
    offload = None
    if parameters:
        offload = "all"
    elif optimizer or (parameters is False and given.get("offload") == "all"):
        offload = "optimizer"
    elif optimizer is False:
        offload = "none"
    is_stage_3 = zero.get("stage", given.get("zero_stage")) in (None, 3)  # other stages ignore the keys of stage 3
    return {
        "offload": offload,
        "hpz_size": zero.get("zero_hpz_partition_size"),
        **{name: zero.get(key) if is_stage_3 else None for name, key in _OF_STAGE_3.items()},
    }


def check_deepspeed_json(
    content: dict[str, Any], run: ResolvedRun, zero_stage: int, keeps_weights: bool, path: Path
) -> None:
    """Raise ConfigError if the JSON file contradicts the resolved run."""
    for precision in ("bf16", "fp16"):
        enabled = content.get(precision, {}).get("enabled")
        if enabled is not None and bool(enabled) != (run.policy.compute == precision):
            raise ConfigError(f"{path} sets {precision}.enabled={enabled}, but the run's precision is {run.precision}")
    dtypes = content.get("data_types", {})
    if dtypes.get("param_dtype", run.policy.compute) != run.policy.compute:
        raise ConfigError(
            f"{path} sets data_types.param_dtype={dtypes['param_dtype']}, but the run's precision is {run.precision}; "
            f"remove it, or change precision"
        )
    for key, value in _LOSS_SCALE.items():
        if run.policy.scales_loss and (set_to := content.get("fp16", {}).get(key, value)) != value:
            raise ConfigError(
                f"{path} sets fp16.{key}={set_to}, but it is {value} under every engine; use {value}, or remove it"
            )
    wire = content.get("communication_data_type")
    if wire is not None and wire != run.grad_dtype:
        both = f"use grad_dtype={wire} for both, or remove it" if wire in run.policy.grad_dtypes else "remove it"
        raise ConfigError(f"{path} sets communication_data_type={wire}, but gradients are {run.grad_dtype}; {both}")
    zero = content.get("zero_optimization", {})
    for key in _KEPT_WEIGHTS if keeps_weights else ():
        if key in zero:
            raise ConfigError(
                f"{path} sets zero_optimization.{key}, but so does reshard_after_forward=false; remove one of them"
            )
    for key, default in _PRESCALING.items():
        if zero_stage >= 2 and content.get(key, default) != default:
            raise ConfigError(
                f"{path} sets {key}={content[key]}, which DeepSpeed supports only with zero_stage 0 and 1, not "
                f"{zero_stage}; remove it"
            )
    bucket = zero.get("reduce_bucket_size")
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
