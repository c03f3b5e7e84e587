"""Find ranks on slow GPUs: every rank times the same matrix product between steps, without any communication."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megabench.record import Straggler
from megabench.runtime.device import DTYPES, synchronize
from megabench.runtime.rendezvous import gather_objects
from megabench.train.callbacks.callback import Callback, Step, TrainerState

MARGIN = 1.25  # a rank is slow if its product takes this multiple of the median of all ranks
CONFIRMATIONS = 2  # number of consecutive slow checks, because a single slow check may be noise
_SIZES = {"cuda": 4096, "cpu": 384}
_REPEATS = 5


class StragglerDetector(Callback):
    """Times a fixed matrix product on every rank after every `every` steps, outside the measured steps.

    The time of a training step does not show which rank is slow, because collectives make all ranks wait for the slow
    rank.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._slow_in_a_row: dict[int, int] = {}
        self._found: dict[int, Straggler] = {}

    def on_ready(self, trainer: TrainerState) -> None:
        self._trainer = trainer
        self._gpus: list[int] = gather_objects(trainer.rendezvous.local_rank)
        self.measure()  # the first matrix product loads its kernel, so do not time it

    def between_steps(self, step: Step) -> None:
        if step.number % self._every:
            return
        device = self._trainer.device
        mine = torch.tensor([self.measure()], dtype=torch.float64, device=device)
        everyone = torch.empty(dist.get_world_size(), dtype=torch.float64, device=device)
        dist.all_gather_into_tensor(everyone, mine)
        self._judge(step.number, everyone.tolist())

    def measure(self) -> float:
        """Return the seconds of the fastest of a few products on this rank."""
        run, device = self._trainer.run, self._trainer.device
        size, seconds = _SIZES[device.type], []
        # allocate the matrices for each check, so that the peak memory of the run does not include them
        matrix = torch.ones(size, size, dtype=DTYPES[run.precision], device=device)
        for _ in range(_REPEATS):
            synchronize(device)
            started = time.perf_counter()
            torch.mm(matrix, matrix)
            synchronize(device)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def _judge(self, step: int, seconds: Sequence[float]) -> None:
        """Report each rank that has been slow in consecutive checks, once."""
        median = statistics.median(seconds)
        for rank, own in enumerate(seconds):
            is_slow = own > MARGIN * median
            self._slow_in_a_row[rank] = self._slow_in_a_row.get(rank, 0) + 1 if is_slow else 0
            if self._slow_in_a_row[rank] < CONFIRMATIONS or rank in self._found:
                continue
            host, gpu = self._trainer.hosts[rank], self._gpus[rank] if self._trainer.device.type == "cuda" else None
            found = Straggler(rank=rank, host=host, gpu=gpu, step=step, slowdown=own / median)
            self._found[rank] = found
            self._trainer.note(
                f"WARNING: straggler at step {step}: {found.place} takes {found.slowdown:.2f} times the median of all "
                f"ranks for the same matrix product, and every other rank waits for it"
            )

    def section(self, by_rank: Sequence[Any]) -> Mapping[str, Any]:
        return {"stragglers": [self._found[rank] for rank in sorted(self._found)]}
