"""Run a user's script until it calls `Trainer.train`, write what it would train with, and end the process there.

`python -m megabench.programs.read_trainer_script FILE FOLDER SCRIPT ARGUMENT…` writes a `TrainerScript` as JSON to
FILE. It saves the model to FOLDER if no directory contains it. The script's output directory is not created.
"""

import json
import os
import runpy
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from deepspeed import zero
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, Trainer, TrainingArguments
from transformers.integrations import HfDeepSpeedConfig

from megabench.specs.trainer_script import TrainerScript

# The methods of Trainer that compute and repeat a step, as they are before a script replaces them
_STEP = {
    name: getattr(Trainer, name)
    for name in (
        "compute_loss",
        "training_step",
        "create_optimizer",
        "create_scheduler",
        "create_optimizer_and_scheduler",
        "get_batch_samples",
        "_inner_training_loop",
    )
}
_PASSED = ("optimizer", "lr_scheduler", "optimizer_cls_and_kwargs", "compute_loss_func")  # objects given to Trainer


def main() -> None:
    file, folder, script, *arguments = sys.argv[1:]
    Trainer.train = lambda trainer, *_, **__: _write_and_exit(trainer, Path(file), Path(folder))
    Trainer.init_hf_repo = lambda *_, **__: None  # with push_to_hub, it creates a repository
    TrainingArguments.should_save = False  # Trainer would create its output directory
    # the arguments are for GPUs, which this process need not have
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    transformers.training_args.is_torch_tf32_available = lambda: True
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _write_and_exit(trainer: Any, file: Path, folder: Path) -> NoReturn:
    file.write_text(json.dumps(asdict(read(trainer, folder)), default=str), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the script must neither continue nor clean up


def read(trainer: Any, folder: Path) -> TrainerScript:
    """Return what a Trainer would train with. Saves the model to `folder` if no directory contains it."""
    problem = why_not_compared(trainer)
    model, seq_length = (None, None) if problem else (_directory(trainer, folder), _seq_length(trainer))
    deepspeed = HfDeepSpeedConfig(trainer.args.deepspeed).config if trainer.args.deepspeed else None
    given, defaults = trainer.args.to_dict(), TrainingArguments().to_dict()
    names = [field.name for field in fields(TrainingArguments) if field.name != "deepspeed"]
    arguments = {name: given[name] for name in names if given[name] != defaults[name]}
    if trainer.model.is_gradient_checkpointing:  # a script may enable it without an argument
        arguments["gradient_checkpointing"] = True
    return TrainerScript(arguments, deepspeed, problem, model, seq_length)


def why_not_compared(trainer: Any) -> str | None:
    """Return the reason why megabench cannot train as this Trainer does, or None."""
    kind, model = type(trainer).__name__, trainer.model
    for name, original in _STEP.items():
        if getattr(getattr(trainer, name), "__func__", None) is not original:
            return f"{kind} replaces {name} of transformers.Trainer"
    for name in _PASSED:
        if getattr(trainer, name) is not None:
            return f"the script passes its own {name} to {kind}"
    if hasattr(model, "_loss_function"):
        return f"the script gives {type(model).__name__} a loss function of its own"
    if any(not parameter.requires_grad for parameter in model.parameters()):
        return "it trains only some of the parameters, as LoRA and quantized models do"
    if type(model) not in MODEL_FOR_CAUSAL_LM_MAPPING.values():
        return f"{type(model).__name__} is not a causal language model of transformers"
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not trainer.args.deepspeed and dtypes != {torch.float32}:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"without DeepSpeed, its weights and optimizer state are {names}, and those of the study are fp32"
    return None


def _seq_length(trainer: Any) -> int | None:
    """Return the tokens per sequence of the first batch, or None if it is not a whole batch of sequences."""
    try:
        num_rows, length = next(iter(trainer.get_train_dataloader()))["input_ids"].shape
    except Exception:  # scripts may have any data
        return None
    return int(length) if num_rows == trainer.args.train_batch_size else None


def _directory(trainer: Any, folder: Path) -> str:
    """Return the directory of the model. Save the model to `folder` if the script changed its shapes or made it."""
    model = trainer.model
    source = Path(model.config._name_or_path or os.devnull)
    if source.is_dir():
        with torch.device("meta"):
            saved = type(model)(AutoConfig.from_pretrained(source))
        if _shapes(saved) == _shapes(model):
            return str(source.resolve())
    with zero.GatheredParameters([parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]):
        model.save_pretrained(folder)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
    return str(folder)


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters. ZeRO-3 keeps them in `ds_shape`."""
    return {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in model.named_parameters()}


if __name__ == "__main__":
    main()
