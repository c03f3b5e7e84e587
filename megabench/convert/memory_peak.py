"""Measurement of the anonymous memory of this process, which excludes the pages of memory-mapped files."""

import threading
from pathlib import Path

import torch
import torch.distributed as dist

_STATUS = Path("/proc/self/status")
_SECONDS = 0.02


def anonymous_bytes() -> int:
    """Return the anonymous resident memory of this process in bytes (RssAnon in proc(5))."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


class PeakMemoryMeter:
    """Peak growth of this process's anonymous memory since construction. A thread samples the memory until `close`."""

    def __init__(self) -> None:
        self._first = self._peak = anonymous_bytes()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._thread.start()

    def close(self) -> int:
        """Stop sampling, and return the peak memory growth in bytes."""
        self._closed.set()
        self._thread.join()
        return self._peak - self._first

    def _watch(self) -> None:
        while not self._closed.wait(_SECONDS):
            self._peak = max(self._peak, anonymous_bytes())


def largest_of_all(value: int) -> int:
    """Return the maximum of `value` over all ranks. All ranks must call the function."""
    largest = torch.tensor(value)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
