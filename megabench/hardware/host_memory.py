"""Host memory: the memory that is available to a process, and the peak memory of this process. Loads no torch."""

import threading
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/status")
_SECONDS = 0.02  # between two samples of the memory


def available_host_bytes() -> int:
    """Return the bytes of memory that are available on this host, or in the container of this process."""
    free = psutil.virtual_memory().available
    if (limit := _read_number("memory.max")) is not None and (used := _read_number("memory.current")) is not None:
        free = min(free, limit - used + (_read_reclaimable() or 0))
    return free


def _read_number(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):  # no memory limit: the system has no cgroup v2, or the file contains "max"
        return None


def _read_reclaimable() -> int | None:
    """Return the bytes of the page cache, which the kernel counts as used but frees on demand."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
    except (OSError, ValueError, IndexError):
        return None


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
