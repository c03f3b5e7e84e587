"""Callbacks of the runs that roll back: one poisons batches and inspects checkpoints, one repeats the surviving steps.

Both read the environment variable ROLLBACKS, a JSON object.
"""

import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from megabench.checkpoint import CheckpointError
from megabench.checkpoint import save as save_module
from megabench.checkpoint.weights_only import open_weights
from megabench.data.batch import micro_batches
from megabench.record import Rollback, SaveTimes
from megabench.train.callbacks import Callback
from megabench.train.callbacks.callback import TrainerState
from megabench.train.resume import batch_of_step
from tests.faults.sitecustomize import poison


def problem_of(folder: Path) -> str | None:
    """Why a checkpoint cannot be loaded, or None."""
    try:
        open_weights(folder)
    except CheckpointError as error:
        return str(error)
    return None


class Poison(Callback):
    """Poisons the weights before each of the batches "bad", counted from 0, and inspects all checkpoints at each save.

    The rank "slow_rank" starts to write its files, or reports them, "slow_seconds" late. Damaged checkpoints are listed
    in the file "damaged".
    """

    def __init__(self) -> None:
        self._given = json.loads(os.environ["ROLLBACKS"])
        self._listed: set[int] = set()

    def on_start(self, trainer: TrainerState) -> None:
        self._trainer = trainer
        if trainer.rank == self._given["slow_rank"]:
            write = save_module.write_files

            def write_late(*arguments: Any) -> Any:
                seconds, is_after = self._given["slow_seconds"], self._given["is_slow_after_writing"]
                time.sleep(0.0 if is_after else seconds)
                files = write(*arguments)
                time.sleep(seconds if is_after else 0.0)
                return files

            save_module.write_files = write_late  # type: ignore[assignment]

    def around_step(self, step: int) -> AbstractContextManager[object]:
        if batch_of_step(self._trainer.rollbacks, step - 1) in self._given["bad"]:
            poison(self._trainer.engine)
        return nullcontext()

    def on_save(self, save: SaveTimes) -> None:
        assert self._trainer.run.save is not None
        for folder in sorted(self._trainer.run.save.glob("step-*")):
            is_listed = folder.stat().st_ino in self._listed  # a renamed directory keeps its inode
            if not is_listed and (problem := problem_of(folder)):
                self._listed.add(folder.stat().st_ino)
                with open(self._given["damaged"], "a", encoding="utf-8") as file:
                    file.write(f"{folder.name} after the save of step {save.step}: {problem}\n")


class Repeat(Callback):
    """Trains on the batches on which a run with the rollbacks "rollbacks" has trained, without any rollback."""

    def on_start(self, trainer: TrainerState) -> None:
        given = json.loads(os.environ["ROLLBACKS"])
        rollbacks = [Rollback(**rollback) for rollback in given["rollbacks"]]

        def batches(step: int) -> Any:
            dp_rank = trainer.run.layout.coordinates(trainer.rank).dp
            return micro_batches(trainer.source, trainer.run, dp_rank, batch_of_step(rollbacks, step))

        trainer.batches = batches  # type: ignore[method-assign]
