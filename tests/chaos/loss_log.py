"""A callback that writes the loss of every step with all digits, even of runs that are killed."""

import os
from pathlib import Path

from megabench.train.callbacks import Callback, Step
from megabench.train.callbacks.callback import TrainerState

Key = tuple[int, int]  # the number of rollbacks so far, and the step


class LossLog(Callback):
    """Appends "ROLLBACKS STEP LOSS" lines to the file in the environment variable LOSS_LOG."""

    def on_start(self, trainer: TrainerState) -> None:
        self._trainer = trainer

    def on_step_end(self, step: Step) -> None:
        if self._trainer.rank == 0:
            with open(os.environ["LOSS_LOG"], "a", encoding="utf-8") as file:
                file.write(f"{len(self._trainer.rollbacks)} {step.number} {step.result.loss!r}\n")


def read_losses(path: Path) -> list[tuple[Key, float]]:
    """The losses in the order in which they were written; the last line of a killed run may be incomplete."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [((int(count), int(step)), float(loss)) for count, step, loss in map(str.split, lines)]
