"""A callback that writes down how its run ended, and makes the run fail in a given way."""

import os
import signal
import time
from pathlib import Path

from megabench.train.callbacks import Callback, Step, TrainerState


class Witness(Callback):
    def __init__(self, path: str, fault: str = "none") -> None:
        self._path, self._fault = Path(path), fault

    def on_ready(self, trainer: TrainerState) -> None:
        if self._fault == "nan":
            trainer.engine.training_state().shards[0].values.fill_(float("nan"))
            trainer.engine.restored(0, None)

    def on_step_end(self, step: Step) -> None:
        if step.number != 3:
            return
        match self._fault:
            case "raise":
                raise RuntimeError("the third step is one too many")
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(600)
            case "hang":
                time.sleep(600)

    def on_error(self, reason: str) -> None:
        self._write(f"error: {reason}")

    def close(self) -> None:
        self._write("closed")

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")
