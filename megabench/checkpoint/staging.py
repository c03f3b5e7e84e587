"""Host memory that a checkpoint is copied into, so that training goes on while it is written."""

from pathlib import Path

import psutil
import torch

from megabench.checkpoint.files import num_bytes
from megabench.checkpoint.shards import StateShard

_SHARE = 0.8  # of the memory that is free: data, logs and the page cache need some


class Staging:
    """Copies of a rank's own shards: 12 bytes a parameter with Adam, over all ranks together, whatever the layout."""

    def __init__(self, shards: list[StateShard]) -> None:
        owned = [shard.values for shard in shards if shard.is_owner]
        self._memory = torch.empty(sum(map(num_bytes, owned)), dtype=torch.uint8)
        if owned and owned[0].is_cuda:
            self._memory.zero_()  # touched by all threads; the driver would do it with one
            # torch's own pinned allocator rounds up to a power of two
            status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
            if int(status):
                raise MemoryError(f"{self._memory.numel()} bytes of host memory cannot be pinned (CUDA error {status})")

    def fill(self, shards: list[StateShard]) -> list[StateShard]:
        """The owned shards with their values of this moment, copied; valid until the next call."""
        staged, start = [], 0
        for shard in shards:
            if not shard.is_owner:
                continue
            stop = start + num_bytes(shard.values)
            copy = self._memory[start:stop].view(shard.values.dtype)
            copy.copy_(shard.values, non_blocking=True)
            staged.append(StateShard(shard.kind, shard.blocks, copy))
            start = stop
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return staged


def owned_bytes(shards: list[StateShard]) -> int:
    """What a rank saves, and what staging it takes."""
    return sum(num_bytes(shard.values) for shard in shards if shard.is_owner)


def free_host_bytes() -> int:
    """Host memory that this machine, or the container around this process, can still spare for staging."""
    free = psutil.virtual_memory().available
    if (limit := _read_number("memory.max")) is not None and (used := _read_number("memory.current")) is not None:
        free = min(free, limit - used + (_read_reclaimable() or 0))
    return int(free * _SHARE)


_CGROUP = Path("/sys/fs/cgroup")


def _read_number(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return None


def _read_reclaimable() -> int | None:
    """The page cache counts as used, and gives way."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
    except (OSError, ValueError, IndexError):
        return None
