"""TensorBoard scalars of a run.

TensorBoard sorts the groups of tags by name, and opens the first two. So the groups are `throughput`, `train`, `trial`
(the results of a study, written by compare/hparams.py) and `usage`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megabench.metrics import throughput
from megabench.record import Rollback, RunRecord
from megabench.train.callbacks.callback import Callback, Step, TrainerState
from megabench.train.callbacks.hardware_monitor import HardwareMonitor


class TensorBoard(Callback):
    """Writes the scalars of each step on rank 0. Throughput and step time are written for timed steps only.

    A resumed run hides the scalars that the earlier run wrote for later steps, and so does a rollback. If the scalars
    cannot be written, for instance because the disk is full, the log reports that once and the run continues.
    """

    def __init__(self, directory: Path, monitor: HardwareMonitor) -> None:
        self._directory, self._monitor = directory, monitor
        self._writer: SummaryWriter | None = None

    def on_start(self, trainer: TrainerState) -> None:
        self._trainer = trainer
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

    def on_step_end(self, step: Step) -> None:
        run = self._trainer.run
        values = step_scalars(
            loss=step.result.loss,
            grad_norm=step.result.grad_norm,
            learning_rate=step.learning_rate,
            peak_memory_gib=step.peak_memory_gib if run.device == "cuda" else None,
            gpu_utilization=self._monitor.sampler.latest,
        )
        if step.is_timed:
            achieved = throughput([step.seconds], run.shape, run.seq_length, run.global_batch, run.world_size)
            assert achieved is not None
            values |= speed_scalars(
                seconds=step.seconds,
                tokens_per_second=achieved.tokens_per_second,
                world_size=run.world_size,
                tflops_per_device=achieved.tflops_per_device_causal,
                mfu=achieved.mfu(self._trainer.peak_tflops),
            )
        with self._until_it_fails():
            for tag, value in values.items():
                if self._writer and value is not None:
                    self._writer.add_scalar(tag, value, step.number)

    def on_end(self, record: RunRecord, path: Path | None) -> None:
        with self._until_it_fails():
            if self._writer:
                self._writer.close()


def step_scalars(
    loss: float | None,
    grad_norm: float | None,
    learning_rate: float | None,
    peak_memory_gib: float | None,
    gpu_utilization: float | None,
) -> dict[str, float | None]:
    """Return the scalars of any step by tag. A value is None if it is not known."""
    return {
        "train/loss": loss,
        "train/grad_norm": grad_norm,
        "train/learning_rate": learning_rate,
        "usage/peak_reserved_gib": peak_memory_gib,
        "usage/gpu_utilization": gpu_utilization,
    }


def speed_scalars(
    seconds: float, tokens_per_second: float, world_size: int, tflops_per_device: float, mfu: float | None
) -> dict[str, float | None]:
    """Return the additional scalars of a timed step, by tag."""
    return {
        "throughput/step_seconds": seconds,
        "throughput/tokens_per_second": tokens_per_second,
        "throughput/tokens_per_second_per_device": tokens_per_second / world_size,
        "throughput/tflops_per_device": tflops_per_device,
        "throughput/mfu": mfu,
    }
