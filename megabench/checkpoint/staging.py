"""Host memory that a checkpoint is copied into, so that training goes on while it is written."""

import torch

from megabench.checkpoint.files import num_bytes
from megabench.checkpoint.shards import StateShard
from megabench.hardware.host_memory import available_host_bytes

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
    """Return the bytes of host memory that may be used for staging."""
    return int(available_host_bytes() * _SHARE)
