"""Anonymous memory of this process: what it allocates itself, beside the pages of mapped files."""

import threading
from pathlib import Path

import torch
import torch.distributed as dist

_STATUS = Path("/proc/self/status")
_SECONDS = 0.02


def anonymous_bytes() -> int:
    """Anonymous memory in use; proc(5), RssAnon."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


class PeakMemory:
    """The most that this process came to use beyond what it used at first, sampled in a thread until it is closed."""

    def __init__(self) -> None:
        self._first = self._peak = anonymous_bytes()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._thread.start()

    def close(self) -> int:
        """Ends sampling; bytes."""
        self._closed.set()
        self._thread.join()
        return self._peak - self._first

    def _watch(self) -> None:
        while not self._closed.wait(_SECONDS):
            self._peak = max(self._peak, anonymous_bytes())


def largest_of_all(value: int) -> int:
    """The largest `value` of any rank, on every rank; collective."""
    largest = torch.tensor(value)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
