"""SIGTERM and SIGUSR1, by which Slurm and Kubernetes announce the end: a run that saves stops at a step border."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Takes the signals in, and tells of them when all ranks ask.

    Without `install` they end the process as they always do: a run that saves nothing has nothing to wait for.
    """

    def __init__(self) -> None:
        self._received = 0

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def agreed(self, device: torch.device) -> str | None:
        """The name of a signal that any rank has received, the same on every rank; collective."""
        if dist.get_world_size() == 1:
            number = self._received
        else:
            numbers = torch.tensor([self._received], device=device)
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            number = int(numbers.item())
        return signal.Signals(number).name if number else None
