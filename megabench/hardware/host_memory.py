"""Memory of this host that is available to a process. Loads no torch."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


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
