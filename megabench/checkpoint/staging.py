"""Host-memory buffers for asynchronous checkpoints, which allow training to continue during a save."""

import torch

from megabench.checkpoint.files import num_bytes
from megabench.checkpoint.shards import StateShard
from megabench.hardware.host_memory import available_host_bytes

_SHARE = 0.8  # fraction of the free host memory for staging; data loading, logs and the page cache need the rest


class Staging:
    """A host-memory buffer for copies of the shards that a rank owns.

    With Adam, the buffers of all ranks together use 12 bytes per parameter under any layout.
    """

    def __init__(self, shards: list[StateShard]) -> None:
        owned = [shard.values for shard in shards if shard.is_owner]
        self._memory = torch.empty(sum(map(num_bytes, owned)), dtype=torch.uint8)
        if owned and owned[0].is_cuda:
            self._memory.zero_()  # many threads touch the pages here; the CUDA driver would touch them with one thread
            # PyTorch's allocator for pinned memory would round the size up to a power of two
            status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
            if int(status):
                raise MemoryError(f"{self._memory.numel()} bytes of host memory cannot be pinned (CUDA error {status})")

    def fill(self, shards: list[StateShard]) -> list[StateShard]:
        """Copy the current values of the owned shards, and return the copies, valid until the next `fill`."""
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
    """Return the number of bytes that this rank saves, which is also the size of its staging buffer."""
    return sum(num_bytes(shard.values) for shard in shards if shard.is_owner)


def free_host_bytes() -> int:
    """Return the bytes of host memory that may be used for staging."""
    return int(available_host_bytes() * _SHARE)
