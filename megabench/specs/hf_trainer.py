"""The program hf_trainer: transformers.Trainer, with the files that its users have."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megabench import shipped
from megabench.settings.reading import ConfigError, read_json_object
from megabench.settings.run_settings import RunSettings
from megabench.settings.setting import EngineSettings, setting
from megabench.specs.engine_spec import EngineSpec, Options, ResolvedRun
from megabench.specs.shared_settings import DEEPSPEED_CONFIG

# Arguments of transformers.TrainingArguments that are settings of a run
_SETTINGS = {
    "per_device_train_batch_size": "micro_batch",
    "learning_rate": "lr",
    "max_steps": "steps",
    "warmup_steps": "lr_warmup",
    "weight_decay": "weight_decay",
    "adam_epsilon": "eps",
    "max_grad_norm": "clip_grad",
    "seed": "seed",
}
# Schedules by the name in TrainingArguments. They decay to zero, and all of them warm up.
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
# Arguments that a measured run sets itself: it logs every step, and neither saves nor evaluates.
REPLACED = frozenset(
    {
        "output_dir",
        "overwrite_output_dir",
        "num_train_epochs",
        "do_train",
        "do_eval",
        "do_predict",
        "run_name",
        "report_to",
        "disable_tqdm",
        "logging_dir",
        "logging_steps",
        "logging_strategy",
        "logging_first_step",
        "logging_nan_inf_filter",
        "log_level",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_only_model",
        "save_safetensors",
        "load_best_model_at_end",
        "eval_strategy",
        "evaluation_strategy",
        "eval_steps",
        "eval_on_start",
        "per_device_eval_batch_size",
        "metric_for_best_model",
        "greater_is_better",
        "resume_from_checkpoint",
        "push_to_hub",
        "hub_model_id",
        "hub_strategy",
        "hub_token",
        "deepspeed",
        "train_sampling_strategy",
        "group_by_length",
        "remove_unused_columns",
    }
)


class HfTrainerSettings(EngineSettings):
    trainer_args: Path | None = setting(None, "Engine and layout", "option", "free", label="own arguments")
    """A JSON file with TrainingArguments for hf_trainer, e.g. {"gradient_checkpointing": true}."""

    deepspeed_config: Path | None = DEEPSPEED_CONFIG


class HfTrainer(EngineSpec):
    name = "hf_trainer"
    title = "HF Trainer"
    summary = "transformers.Trainer in its own loop, with DeepSpeed, FSDP or DDP"
    implementation = "megabench.programs.hf_trainer:HfTrainer"
    sharding_stage = 0
    settings = HfTrainerSettings
    optimizers = frozenset({"adamw"})
    wants_queues = True

    def read_file(self, run: RunSettings, given: Mapping[str, Any]) -> Mapping[str, Any]:
        path = HfTrainerSettings.of(run).trainer_args
        said = settings_of(_content(path, "trainer") or {}, path)
        for name in given.keys() & said.keys() - {"steps"}:  # a measurement may be shorter
            if given[name] != said[name]:
                raise ConfigError(
                    f"{path} sets {name}={said[name]}, but the run sets {name}={given[name]}; change one of them"
                )
        return {name: value for name, value in said.items() if name not in given}

    def check(self, run: ResolvedRun) -> None:
        own = HfTrainerSettings.of(run)
        if find_spec("accelerate") is None:
            raise ConfigError(
                "hf_trainer needs accelerate, which is not installed; run pip install 'megabench[programs]'"
            )
        if run.policy.has_fp8_products:
            raise ConfigError(f"hf_trainer has no precision={run.precision}; use bf16, fp16 or fp32")
        if not run.clip_grad:
            raise ConfigError("hf_trainer reports the gradient norm only if it clips; use a large clip_grad, e.g. 1e9")
        if run.param_groups:
            raise ConfigError("hf_trainer has no param_groups; omit them, or use an engine")
        steps = (_content(own.trainer_args, "trainer") or {}).get("gradient_accumulation_steps")
        if steps is not None and steps != run.num_micro_batches:
            raise ConfigError(
                f"{own.trainer_args} sets gradient_accumulation_steps={steps}, but global_batch={run.global_batch} is "
                f"{run.num_micro_batches} micro-batches of {run.micro_batch} on {run.layout.dp} ranks; use "
                f"global_batch={steps * run.micro_batch * run.layout.dp}"
            )

    def why_not_saved(self, run: ResolvedRun) -> str | None:
        return "hf_trainer is measured and saves no checkpoints; omit save and load, or train with an engine"

    def other_work(self, run: ResolvedRun) -> Mapping[str, Any]:
        own = HfTrainerSettings.of(run)
        other: dict[str, Any] = {}
        if self.mode(own.model_dump()).startswith("FSDP") and run.policy.compute != "fp32":
            other["grad_dtype"] = run.policy.compute  # accelerate reduces gradients in the dtype of the products
        if "scheduler" in (_content(own.deepspeed_config, "deepspeed") or {}):
            other["schedule"] = {"schedule": "that of the DeepSpeed JSON"}
        return other

    def reads_state(self, run: ResolvedRun) -> bool:
        return self.mode(HfTrainerSettings.of(run).model_dump()) != "FSDP1"

    def mode(self, options: Options) -> str:
        if zero := _zero(options):
            return f"ZeRO-{zero.get('stage', 0)}"
        arguments = _content(options.get("trainer_args"), "trainer") or {}
        if not arguments.get("fsdp"):
            return "DDP"
        return f"FSDP{(arguments.get('fsdp_config') or {}).get('version', 2)}"

    def stage_of(self, options: Options) -> int:
        if zero := _zero(options):
            return int(zero.get("stage", 0))
        return 0 if self.mode(options) == "DDP" else 3

    def recorded(self, options: Options) -> Mapping[str, Any]:
        return {
            "trainer_args": _content(options.get("trainer_args"), "trainer"),
            "deepspeed_config": _content(options.get("deepspeed_config"), "deepspeed"),
        }


def _zero(options: Options) -> dict[str, Any] | None:
    """Return the section zero_optimization of the DeepSpeed JSON, or None without a DeepSpeed JSON."""
    content = _content(options.get("deepspeed_config"), "deepspeed")
    return None if content is None else content.get("zero_optimization", {})


def _content(given: Any, kind: shipped.Kind) -> dict[str, Any] | None:
    """Return the content of a JSON file, from its path or name (in settings) or its content (in records)."""
    return read_json_object(shipped.find(kind, given)) if isinstance(given, str | Path) else given


def settings_of(arguments: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Return the settings of a run that the TrainingArguments of a file contain. Raises ConfigError."""
    said = {name: arguments[argument] for argument, name in _SETTINGS.items() if argument in arguments}
    if said.get("steps", 0) < 0:
        del said["steps"]  # transformers' default of -1: as many steps as the epochs have
    if "adam_beta1" in arguments or "adam_beta2" in arguments:
        said["betas"] = (arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999))
    if "gradient_checkpointing" in arguments:
        said["recompute"] = "full" if arguments["gradient_checkpointing"] else "none"
    enabled = [precision for precision in ("bf16", "fp16") if arguments.get(precision)]
    if len(enabled) > 1:
        raise ConfigError(f"{path} sets both bf16 and fp16; set one of them")
    if enabled:
        said["precision"] = enabled[0]
    if (schedule := arguments.get("lr_scheduler_type")) is not None:
        if schedule not in _SCHEDULES:
            raise ConfigError(
                f"{path} sets lr_scheduler_type={schedule!r}, which the runs to compare with do not have; use one of "
                f"{', '.join(_SCHEDULES)}"
            )
        said["schedule"] = _SCHEDULES[schedule]
        if said["schedule"] != "constant":
            said["min_lr"] = 0.0
    return said
