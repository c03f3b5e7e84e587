"""Make a study of the files or the script with which people start HF Trainer. Loads no torch."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megabench import shipped
from megabench.atomic_write import write_atomically
from megabench.inputs import read_text
from megabench.settings.bounds import NumSteps
from megabench.settings.reading import read_json_object
from megabench.specs.hf_trainer import settings_of
from megabench.specs.registry import PROGRAMS
from megabench.study.study import StudyError, is_valid
from megabench.study.trainer_script import read_script, script_log

_STEPS = 20  # at most; the training itself may have many more
_HEAD = "# Written by megabench compare --trainer\n"
_WARMUP_STEPS = 5
# the defaults of transformers.TrainingArguments that differ from those of a run
_DEFAULTS = {
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "gradient_checkpointing": False,
}
# settings that are those of one trial, and not of the work
_OF_TRIAL = ("micro_batch", "recompute")


def write_script_study(
    path: Path, command: Sequence[str], model: str | None, num_processes: int, needs_length: bool
) -> str:
    """Write a study of what a script would train with, and the JSON files of its configuration beside the study.

    `command` is the script with its arguments, and `model` replaces the script's model. `needs_length` says that
    nothing else sets seq_length. Returns a line that says what was read. Raises StudyError and ConfigError.
    """
    _check_written_here(path)
    file, zero = (path.with_name(f"{path.stem}-{kind}.json") for kind in ("arguments", "deepspeed"))
    others = [] if script_log(path).exists() else [name for name in (file, zero) if name.exists()]
    if others:
        raise StudyError(f"{others[0]} exists, and --trainer has not written it; use another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    script, found = command[0], read_script(command, path)
    files = {file: found.arguments}
    if found.deepspeed is not None:
        files = {file: found.arguments | {"deepspeed": zero.name}, zero: found.deepspeed}
    for name, content in files.items():
        write_atomically(name, json.dumps(content, indent=2) + "\n")
    if found.problem:
        raise StudyError(
            f"{script} cannot be compared: {found.problem}. To compare its arguments without this, use "
            f"--trainer {file} --model DIR --set seq_length=N"
        )
    if needs_length and found.seq_length is None:
        raise StudyError(
            f"the first batch of {script} does not tell the sequence length, because it is not a whole micro-batch of "
            f"sequences; add --set seq_length=N"
        )
    model = model or found.model
    write_trainer_study(path, file, None, model, num_processes, found.seq_length, script)
    length = f", seq_length={found.seq_length} (the first batch)" if found.seq_length else ""
    return f"read from {script}: {', '.join(map(str, files))}, model={model}{length}"


def write_trainer_study(
    path: Path,
    arguments: Path,
    deepspeed: Path | None,
    model: str | None,
    num_processes: int,
    seq_length: int | None = None,
    script: str | None = None,
) -> None:
    """Write a study of a configuration of HF Trainer: as it is, and the same ZeRO with the best settings here.

    `arguments` is a JSON file with TrainingArguments. `deepspeed` is a DeepSpeed JSON, which the arguments may name.
    `script` is the script from which they were read. Raises StudyError and ConfigError.
    """
    file = shipped.find("trainer", arguments)
    given = read_json_object(file)
    if deepspeed is None and (named := given.get("deepspeed")):
        if not isinstance(named, str):
            raise StudyError(f"{file}: deepspeed must be the path of a DeepSpeed JSON; give it with --deepspeed")
        deepspeed = Path(named) if Path(named).is_absolute() else file.parent / named
    given = _DEFAULTS | given
    said = settings_of(given, file)
    accumulated = given.get("gradient_accumulation_steps", 1)
    counts = (accumulated, said["micro_batch"], said.get("steps", _STEPS))
    if not all(is_valid(NumSteps, count) for count in counts):
        raise StudyError(
            f"{file}: per_device_train_batch_size, gradient_accumulation_steps and max_steps must be whole numbers"
        )
    base: dict[str, Any] = {"model": model} if model else {}
    if seq_length:
        base["seq_length"] = seq_length
    base |= {name: value for name, value in said.items() if name not in _OF_TRIAL}
    base["betas"] = list(base["betas"])
    base["precision"] = said.get("precision", "fp32")  # transformers' default
    base["steps"] = min(base.get("steps", _STEPS), _STEPS)
    base["warmup_steps"] = min(_WARMUP_STEPS, base["steps"] // 2)
    if "lr_warmup" not in said and (share := given["warmup_steps"]):  # settings_of leaves out a share of the steps
        base["lr_warmup"] = math.ceil(share * base["steps"])
    base["global_batch"] = said["micro_batch"] * accumulated * num_processes
    mine: dict[str, Any] = {"name": "yours", "program": "hf_trainer", "trainer_args": str(file.resolve())}
    if deepspeed:
        mine["deepspeed_config"] = str(shipped.find("deepspeed", deepspeed).resolve())
    mine |= {name: said[name] for name in _OF_TRIAL}
    content = {
        "name": path.stem,
        "question": "How fast is this HF Trainer beside the same method at its best, and beside other layouts?",
        "answers": "fastest",
        "base": base,
        "trials": [mine, _tuned(mine)],
        "reference": "yours",
    }
    _check_written_here(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    source = f"# Read from {' '.join(str(Path(script).resolve()).split())}\n" if script else ""
    write_atomically(path, _HEAD + source + yaml.safe_dump(content, sort_keys=False, width=120))


def _check_written_here(path: Path) -> None:
    """Raise StudyError if a study exists that --trainer has not written."""
    if path.exists() and not read_text(path).startswith(_HEAD):
        raise StudyError(f"{path} exists and is not a study that --trainer wrote; use another --out")


def _tuned(mine: dict[str, Any]) -> dict[str, Any]:
    """Return the method of a trial of HF Trainer with the settings that are best here."""
    spec, found = PROGRAMS["hf_trainer"], {"micro_batch": "auto", "recompute": "auto"}
    mode = spec.mode(mine) or ""
    if mode.startswith("ZeRO"):
        stage = spec.stage_of(mine)
        whole_layers = {"zero_leaf_layers": True} if stage == 3 else {}
        return {"name": f"zero{stage}-tuned", "engine": "deepspeed", "zero_stage": stage, **whole_layers, **found}
    if mode.startswith("FSDP"):
        return {"name": "fsdp-tuned", "engine": "fsdp", "compile": True, **found}
    return {"name": "ddp-tuned", "engine": "ddp", **found}
