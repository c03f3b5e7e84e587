"""TensorBoard scalars of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megabench.config import ResolvedConfig
from megabench.engines.base import StepResult
from megabench.metrics import throughput


class Scalars:
    """Writes the scalars of each step as rank 0 sees it; throughput and time of timed steps alone.

    `num_done` steps were done by earlier runs; what those wrote of later steps is hidden. Where the disk is full, or
    else takes no more, that is said by `say`, once, and the run goes on without.
    """

    def __init__(
        self,
        directory: Path,
        run: ResolvedConfig,
        peak_tflops: float | None,
        num_done: int,
        say: Callable[[str], None],
    ) -> None:
        self.run = run
        self.peak_tflops = peak_tflops
        self.first_timed_step = num_done + run.warmup_steps + 1
        self._say = say
        self._writer: SummaryWriter | None = None
        with self._going_on():
            self._writer = SummaryWriter(str(directory), purge_step=num_done + 1 if num_done else None)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Goes on without scalars where they cannot be written."""
        try:
            yield
        except OSError as error:
            self._writer = None
            self._say(f"ERROR: TensorBoard's scalars end here: {error.strerror or error}")

    def step(
        self,
        step: int,
        result: StepResult,
        learning_rate: float,
        seconds: float,
        peak_memory_gib: float,
        gpu_utilization: float | None,
    ) -> None:
        """Writes step `step`, counted from 1."""
        run = self.run
        values: dict[str, float | None] = {
            "loss/train": result.loss,
            "optim/grad_norm": result.grad_norm,
            "optim/learning_rate": learning_rate,
            "memory/peak_reserved_gib": peak_memory_gib if run.device == "cuda" else None,
            "gpu/utilization": gpu_utilization,
        }
        if step >= self.first_timed_step:
            achieved = throughput([seconds], run.shape, run.seq_length, run.global_batch, run.world_size)
            assert achieved is not None
            values |= {
                "time/step_seconds": seconds,
                "throughput/tokens_per_second": achieved.tokens_per_second,
                "throughput/tokens_per_second_per_device": achieved.tokens_per_second_per_device,
                "throughput/tflops_per_device": achieved.tflops_per_device_causal,
                "throughput/mfu": achieved.mfu(self.peak_tflops),
            }
        with self._going_on():
            for tag, value in values.items():
                if self._writer and value is not None:
                    self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        with self._going_on():
            if self._writer:
                self._writer.close()
