"""How a run ends early: by a signal, at a step border, or by an error that needs no traceback.

Slurm and Kubernetes announce the end of a job by SIGTERM or SIGUSR1.
"""

import signal
from types import FrameType

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StoppedError(Exception):
    """The run cannot go on, or did not keep what it should; every rank raises it at the same step.

    The command prints its sentence without a traceback and exits with status 1.
    """


class StopSignal:
    """Notes the signals, so that all ranks can agree to stop at the same step.

    Before `install` they end the process as usual, because a run that saves nothing has no reason to wait.
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
