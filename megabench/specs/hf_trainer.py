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
from megabench.specs.program_files import check_same
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
# Schedules by the name in TrainingArguments. Those that decay end at zero.
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_RECOMPUTATION = ("gradient_checkpointing", "activation_checkpointing")  # the first is the older name
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_OF_DEEPSPEED = ("adam", "adamw")  # types of the section `optimizer` of a DeepSpeed JSON, in lower case
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
        return check_same(path, settings_of(_content(path, "trainer") or {}, path), given)

    def check(self, run: ResolvedRun) -> None:
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
        own = HfTrainerSettings.of(run)
        if own.trainer_args:
            _check_arguments(_content(own.trainer_args, "trainer") or {}, run, own)
        if own.deepspeed_config:
            _check_deepspeed(_content(own.deepspeed_config, "deepspeed") or {}, run, own.deepspeed_config)

    def why_not_saved(self, run: ResolvedRun) -> str | None:
        return "hf_trainer is measured and saves no checkpoints; omit save and load, or train with an engine"

    def other_work(self, run: ResolvedRun) -> Mapping[str, Any]:
        own = HfTrainerSettings.of(run)
        mode, content = self.mode(own.model_dump()), _content(own.deepspeed_config, "deepspeed") or {}
        dtypes = {run.grad_dtype}  # DeepSpeed's, unless its JSON has others
        if mode == "DDP":
            dtypes = {"fp32"}  # the weights are fp32
        elif mode.startswith("FSDP"):
            dtypes = {run.policy.compute}  # accelerate reduces gradients in the dtype of the products
        given = content.get("communication_data_type"), content.get("data_types", {}).get("grad_accum_dtype")
        dtypes = {dtype for dtype in given if dtype} or dtypes
        other: dict[str, Any] = {}
        if dtypes != {run.grad_dtype}:
            other["grad_dtype"] = " and ".join(sorted(dtypes))
        if "scheduler" in content:
            other["schedule"] = {"schedule": "that of the DeepSpeed JSON"}
        return other

    def reads_state(self, run: ResolvedRun) -> bool:
        own = HfTrainerSettings.of(run)
        mode, arguments = self.mode(own.model_dump()), _content(own.trainer_args, "trainer") or {}
        if mode == "ZeRO-0" and run.policy.compute != "fp32":
            return False  # DeepSpeed hides the masters
        is_compiled = bool(arguments.get("torch_compile"))  # which renames the parameters of DeepSpeed's module
        return mode != "FSDP1" and not (is_compiled and mode.startswith("ZeRO"))

    def mode(self, options: Options) -> str:
        if (zero := _zero(options)) is not None:
            return f"ZeRO-{zero.get('stage', 0)}"
        arguments = _content(options.get("trainer_args"), "trainer") or {}
        return f"FSDP{fsdp_config(arguments).get('version', 2)}" if arguments.get("fsdp") else "DDP"

    def stage_of(self, options: Options) -> int:
        if (zero := _zero(options)) is not None:
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
    return None if content is None else _section(content, "zero_optimization", "the DeepSpeed JSON")


def fsdp_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of FSDP in TrainingArguments, by their names without the optional prefix "fsdp_"."""
    section = _section(arguments, "fsdp_config", "the file of trainer_args")
    return {name.removeprefix("fsdp_"): value for name, value in section.items()}


def recomputes_by_fsdp(arguments: Mapping[str, Any]) -> bool:
    """Return whether FSDP recomputes activations, instead of transformers."""
    return str(fsdp_config(arguments).get("activation_checkpointing")).lower() == "true"


def _section(content: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return an object in a JSON file, or {} if the file does not have it."""
    section = content.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{name} in {where} must be an object, e.g. {{}}, not {section!r}")
    return section


def _check_arguments(arguments: Mapping[str, Any], run: ResolvedRun, own: HfTrainerSettings) -> None:
    """Raise ConfigError for arguments with which the program would do other work than the run says."""
    path = own.trainer_args
    if arguments.get("deepspeed") and not own.deepspeed_config:
        raise ConfigError(f"{path} names a DeepSpeed JSON; give the trial deepspeed_config={arguments['deepspeed']}")
    accelerator = _section(arguments, "accelerator_config", str(path))
    changed = [name for name in ("split_batches", "gradient_accumulation_kwargs") if accelerator.get(name)]
    changed += ["auto_find_batch_size"] * bool(arguments.get("auto_find_batch_size"))
    if changed:
        raise ConfigError(f"{path} sets {changed[0]}, which changes the batch; remove it, and set micro_batch")
    optimizer = arguments.get("optim") or _OPTIMIZERS[0]
    if optimizer not in _OPTIMIZERS:
        raise ConfigError(
            f"{path} sets optim={optimizer!r}, but hf_trainer is compared with AdamW; use {_OPTIMIZERS[0]}"
        )
    steps = arguments.get("gradient_accumulation_steps")
    if steps is not None and steps != run.num_micro_batches:
        raise ConfigError(
            f"{path} sets gradient_accumulation_steps={steps}, but global_batch={run.global_batch} is "
            f"{run.num_micro_batches} micro-batches of {run.micro_batch} on {run.layout.dp} ranks; use "
            f"global_batch={steps * run.micro_batch * run.layout.dp}"
        )


def _check_deepspeed(content: Mapping[str, Any], run: ResolvedRun, path: Path) -> None:
    """Raise ConfigError if a DeepSpeed JSON contradicts the run, at which transformers stops after loading."""
    expected: dict[str, Any] = {
        "train_batch_size": run.global_batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.num_micro_batches,
        "gradient_clipping": run.clip_grad,
    }
    for name, value in expected.items():
        if content.get(name, "auto") not in ("auto", value):
            raise ConfigError(f'{path} sets {name}={content[name]}, but it is {value} in the run; use "auto"')
    for precision in ("bf16", "fp16"):
        enabled = _section(content, precision, str(path)).get("enabled", "auto")
        if enabled not in ("auto", run.policy.compute == precision):
            raise ConfigError(
                f'{path} sets {precision}.enabled={enabled}, but the run has precision={run.precision}; use "auto"'
            )
    kind = str(_section(content, "optimizer", str(path)).get("type", _OF_DEEPSPEED[0]))
    if kind.lower() not in _OF_DEEPSPEED:
        raise ConfigError(f"{path} has the optimizer {kind}, but hf_trainer is compared with AdamW; use AdamW")


def _content(given: Any, kind: shipped.Kind) -> dict[str, Any] | None:
    """Return the content of a JSON file, from its path or name (in settings) or its content (in records)."""
    return read_json_object(shipped.find(kind, given)) if isinstance(given, str | Path) else given


def settings_of(arguments: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Return the settings of a run that the TrainingArguments of a file contain. Raises ConfigError."""
    said = {name: arguments[argument] for argument, name in _SETTINGS.items() if arguments.get(argument) is not None}
    if said.get("steps") == -1:
        del said["steps"]  # transformers' default: as many steps as the epochs have
    if isinstance(warmup := said.get("lr_warmup"), float):
        said["lr_warmup"] = int(warmup)
        if 0 < warmup < 1:
            del said["lr_warmup"]  # a share of the steps, of which a measurement has fewer
    if "adam_beta1" in arguments or "adam_beta2" in arguments:
        said["betas"] = (arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999))
    asked = [arguments[name] for name in _RECOMPUTATION if arguments.get(name) is not None]
    if recomputes_by_fsdp(arguments):
        asked.append(True)
    if asked:
        said["recompute"] = "full" if any(asked) else "none"
    enabled = [precision for precision in ("bf16", "fp16") if arguments.get(precision)]
    if len(enabled) > 1:
        raise ConfigError(f"{path} sets both bf16 and fp16; set one of them")
    if enabled:
        said["precision"] = enabled[0]
    if (schedule := arguments.get("lr_scheduler_type")) is not None:
        if str(schedule) not in _SCHEDULES:
            raise ConfigError(
                f"{path} sets lr_scheduler_type={schedule!r}, which the runs to compare with do not have; use one of "
                f"{', '.join(_SCHEDULES)}"
            )
        said["schedule"] = _SCHEDULES[schedule]
        if said["schedule"] != "constant":
            said["min_lr"] = 0.0
    return said
