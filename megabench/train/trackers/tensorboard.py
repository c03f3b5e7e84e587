"""Write the metrics of each step as TensorBoard scalars.

TensorBoard sorts the groups of tags by name, and opens the first two. So the groups are `throughput`, `train`, `trial`
(the results of a study, written by comparison/hparams.py) and `usage`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread
from torch.utils.tensorboard import SummaryWriter

from megabench.record import Rollback
from megabench.train.callbacks.callback import Callback, Step, TrainerState


def _print_traceback(error: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread. TensorBoard raises the errors of its own thread again in the main thread."""
    if not isinstance(error.thread, _AsyncWriterThread):
        threading.__excepthook__(error)


class TensorBoard(Callback):
    """Writes the scalars of each step on rank 0. Throughput and step time are written for timed steps only.

    A resumed run hides the scalars that the earlier run wrote for later steps, and so does a rollback. If the scalars
    cannot be written, for instance because the disk is full, the log reports that once and the run continues.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def on_start(self, trainer: TrainerState) -> None:
        self._trainer = trainer
        threading.excepthook = _print_traceback
        self._open(trainer.num_before)

    def _open(self, num_done: int) -> None:
        with self._until_it_fails():
            self._writer = SummaryWriter(str(self._directory), purge_step=num_done + 1 if num_done else None)

    def on_rollback(self, trainer: TrainerState, rollback: Rollback) -> None:
        if self._writer:
            with self._until_it_fails():
                self._writer.close()
            self._open(rollback.restored_step)

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        """Stop writing scalars at the first error."""
        try:
            yield
        except OSError as error:
            self._writer = None
            self._trainer.note(
                f"ERROR: TensorBoard scalars are no longer written, because writing failed: {error.strerror or error}"
            )

    def on_metrics(self, step: Step) -> None:
        with self._until_it_fails():
            for tag, value in step.metrics.items():
                if self._writer and (step.is_timed or not tag.startswith("throughput/")):
                    self._writer.add_scalar(tag, value, step.number)

    def close(self) -> None:
        with self._until_it_fails():
            if self._writer:
                self._writer.close()
