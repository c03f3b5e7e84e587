"""End a run early: after a signal, at the end of a step, or with an error that needs no traceback.

Slurm and Kubernetes announce the end of a job with SIGTERM or SIGUSR1.
"""

import signal
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StoppedError(Exception):
    """Raised if the run cannot continue, or could not save its results.

    Every rank raises StoppedError at the same step.

    The command prints the error message without a traceback and exits with status 1.
    """


class StopSignal:
    """Records signals, so that all ranks can agree to stop at the same step.

    Before `install` is called, signals end the process as usual, because a run that saves nothing need not wait.
    """

    def __init__(self) -> None:
        self._received = 0

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def agreed(self, device: "torch.device") -> str | None:
        """Return the name of a signal that any rank has received, or None.

        Collective; all ranks get the same result.
        """
        import torch  # here, so that invalid flags are reported without seconds of imports
        import torch.distributed as dist

        if dist.get_world_size() == 1:
            number = self._received
        else:
            numbers = torch.tensor([self._received], device=device)
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            number = int(numbers.item())
        return signal.Signals(number).name if number else None
