"""Read a user's training script for `megabench compare --trainer`. Another process runs the script. Loads no torch."""

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from megabench.hardware.facts import gpu_names
from megabench.runtime.child import Child, end_all, without_launcher
from megabench.settings.reading import read_json_object
from megabench.specs.trainer_script import TrainerScript
from megabench.study.study import StudyError

_READER = "megabench.programs.read_trainer_script"
_TIMEOUT_SECONDS = 600
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
# one process of torchrun, which finds a free port; a script must not report to a tracker
_ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "WANDB_MODE": "disabled",
}


def script_command(given: str) -> list[str] | None:
    """Return the words of "train.py --argument value", or None if `given` is a JSON file. Raises StudyError."""
    if not re.search(r"\.py(['\"\s]|$)", given):
        return None
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise StudyError(f"--trainer {given}: {error}; correct the quotes") from None
    if not words[0].endswith(".py"):
        raise StudyError(
            f"--trainer must begin with the script, not with {words[0]}; omit the launcher and its arguments"
        )
    if not Path(words[0]).is_file():
        raise StudyError(f"--trainer: the script {words[0]} does not exist; use the path of a script")
    return words


def script_log(beside: Path) -> Path:
    """Return the path of the log next to the path `beside`."""
    return beside.with_name(f"{beside.stem}-script.log")


def read_script(command: Sequence[str], beside: Path) -> TrainerScript:
    """Run a script until it calls `Trainer.train`, and return what it would train with.

    The script runs in one process without GPUs. If it fails so and this machine has GPUs, it runs again with one GPU.
    Its output goes to a log next to the path `beside`, and so does a model that no directory contains.

    Raises StudyError if the script does not call `Trainer.train`.
    """
    script, log = command[0], script_log(beside)
    attempts = [_ON_CPU]
    if gpu_names():
        attempts.append({"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]})
    with TemporaryDirectory(prefix="megabench-") as folder:
        found = Path(folder) / "found.json"
        model = beside.with_name(f"{beside.stem}-model").absolute()
        reader = [sys.executable, "-m", _READER, str(found), str(model), *command]
        for device in attempts:
            child = Child(reader, without_launcher(os.environ) | _ENVIRONMENT | device, log)
            status = _wait(child, script)
            if found.exists():
                break
        else:
            said = f": {line}" if (line := child.last_line()) else ""
            raise StudyError(
                f"{script} ended with exit status {status} before it called Trainer.train(){said}; correct the script "
                f"or its arguments (its output is in {log})"
            )
        return TrainerScript(**read_json_object(found))


def _wait(child: Child, script: str) -> int:
    """Return the exit status of the process that runs a script. Raises StudyError if it runs for too long."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    try:
        while (status := child.exit_status()) is None:
            if time.monotonic() > deadline:
                raise StudyError(
                    f"{script} did not call Trainer.train() within {_TIMEOUT_SECONDS} s; prepare its data beforehand, "
                    f"or give it less data (its output is in {child.log})"
                )
            time.sleep(0.1)
    finally:
        end_all([child])
    return status
