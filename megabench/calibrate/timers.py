"""Timing of operations on all ranks simultaneously."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megabench.cost.profile import Measurement
from megabench.runtime.device import DTYPES, synchronize

# Total time of the repetitions of an operation. The repetitions take long enough for a GPU to reach its power limit, as
# in training.
_TARGET_SECONDS = {"cuda": 0.2, "cpu": 0.01}


class Bench:
    """Time operations on all ranks simultaneously and append the results to `measurements`.

    `on_start` is called with the number of each measurement, counted from 1, and its kind before the measurement
    starts.
    """

    def __init__(self, device: torch.device, on_start: Callable[[int, str], None] = lambda number, kind: None) -> None:
        self.device, self._on_start = device, on_start
        self.precision = "bf16" if device.type == "cuda" else "fp32"
        self.measurements: list[Measurement] = []

    def seconds(self, kind: str, operation: Callable[[], object], **sizes: float) -> float:
        """Return the median time of an operation on the slowest rank, in seconds. Repetition hides launch latency."""
        self.start(kind)
        operation()
        once = self.agreed(self._timed(operation, 1))
        repeats = max(1, min(1000, int(_TARGET_SECONDS[self.device.type] / max(once, 1e-7))))
        found = self.agreed(statistics.median(self._timed(operation, repeats) for _ in range(3)))
        self.measurements.append(Measurement(kind=kind, sizes=sizes, seconds=found))
        return found

    def seconds_in_turn(
        self, operations: Mapping[str, Callable[[], object]], before: Callable[[], object], **sizes: float
    ) -> None:
        """Measure the median time of each operation if `before` runs before it, on the slowest rank.

        `operations` has the kind of each measurement. The operations run one after the other. On a GPU, `before` must
        run for longer than the host needs to launch an operation. Otherwise, the measured time includes the launch.
        """
        self.start(" and ".join(operations))

        def timed_round() -> list[Callable[[], float]]:
            clocks = []
            for operation in operations.values():
                before()
                clocks.append(self._clock(operation))
            return clocks

        def once() -> None:
            for clock in timed_round():
                clock()

        once()
        seconds = self.agreed(self._timed(once, 1))
        rounds = max(3, min(1000, int(_TARGET_SECONDS[self.device.type] / max(seconds, 1e-7))))
        clocks = [timed_round() for _ in range(2 * rounds)][rounds:]  # a GPU reaches its power limit in the first half
        for kind, each in zip(operations, zip(*clocks, strict=True), strict=True):
            found = self.agreed(statistics.median(clock() for clock in each))
            self.measurements.append(Measurement(kind=kind, sizes=sizes, seconds=found))

    def start(self, kind: str) -> None:
        """Report that the next measurement starts."""
        self._on_start(len(self.measurements) + 1, kind)

    def _timed(self, operation: Callable[[], object], repeats: int) -> float:
        dist.barrier()
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(repeats):
            operation()
        synchronize(self.device)
        return (time.perf_counter() - started) / repeats

    def _clock(self, operation: Callable[[], object]) -> Callable[[], float]:
        """Run the operation, and return a function that waits for its end and returns its seconds."""
        if self.device.type != "cuda":
            seconds = self._timed(operation, 1)
            return lambda: seconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        operation()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

        return elapsed

    def agreed(self, seconds: float) -> float:
        slowest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=DTYPES[self.precision], device=self.device)
