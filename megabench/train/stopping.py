"""End a run early: after a signal, at the end of a step, or with an error that needs no traceback.

Slurm and Kubernetes announce the end of a job with SIGTERM or SIGUSR1.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StoppedError(Exception):
    """Raised if the run cannot continue, or could not save its results.

    Every rank raises StoppedError at the same step.

    The command prints the error message without a traceback and exits with status 1.
    """


class SignalledError(Exception):
    """Raised if signal `number` ends the run before it can save anything."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


class StopSignal:
    """Receives signals, so that all ranks can agree to stop at the same step.

    Until `save_first` is called, a signal calls `end`, because a run that saves nothing need not wait.

    A thread receives the signals, because Python calls no signal handler while the main thread waits for other ranks.
    """

    def __init__(self, end: Callable[[int], None]) -> None:
        self._end, self._saves, self._received = end, False, 0

    def install(self) -> None:
        """Receive the signals of this process from now on. The main thread must call this method."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=_end_by_signals)
        threading.Thread(target=self._receive, args=(reader,), name="stop-signals", daemon=True).start()

    def save_first(self) -> None:
        """Only record signals from now on. The run saves before it stops."""
        self._saves = True

    def _receive(self, reader: int) -> None:
        while True:
            (number,) = os.read(reader, 1)
            if number in STOP_SIGNALS:
                self._received = number
                if not self._saves:
                    self._end(number)

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


def _end_by_signals() -> None:
    """Let signals end this process, a fork of the training process, which does not receive them."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
