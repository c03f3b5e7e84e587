"""Messages between tensor-parallel ranks of one NVLink domain, which the GPUs' copy engines move.

A rank writes its part into the memory of another rank (torch's symmetric memory) on a second stream, and then sets a
signal there. The multiprocessors are free for the products meanwhile. CUDA_DEVICE_MAX_CONNECTIONS must not be 1: with
one hardware queue, products would wait behind copies and signals.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, _symmetric_memory

from megabench.engines.megatron.exchange import Gathering, Messages, Product


@cache
def copy_engines(group: ProcessGroup) -> "CopyEngines":
    """Return the exchange of a group. All layers share its buffers."""
    return CopyEngines(group)


class CopyEngines(Messages):
    """Messages in the order of `Messages`, through buffers in symmetric memory."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1", "copies need a hardware queue of their own"
        self._gathered, self._received = _Buffers(group, channel=0), _Buffers(group, channel=1)
        self._stream = torch.cuda.Stream(priority=-1)

    def gather(self, part: Tensor) -> Gathering:
        part = part.contiguous()
        everyone = self._gathered.next((self._size * len(part), *part.shape[1:]), part.dtype)
        own, whole = self._rows_of(self._rank, len(part)), everyone[self._rank]
        for target, _ in self._steps():
            self._send(part, everyone[target][own], self._gathered, target)

        def arriving() -> Iterator[slice]:
            whole[own].copy_(part)
            yield own
            for _, source in self._steps():
                self._gathered.await_signal(source)
                yield self._rows_of(source, len(part))

        return Gathering(whole, arriving())

    def reduce_scatter(self, product: Product, num_rows: int) -> Callable[[], Tensor]:
        num_own = num_rows // self._size
        everyone: Sequence[Tensor] = ()
        for target, _ in self._steps():
            theirs = product(self._rows_of(target, num_own))
            everyone = everyone or self._received.next((self._size, *theirs.shape), theirs.dtype)
            self._send(theirs, everyone[target][self._rank], self._received, target)
        total = product(self._rows_of(self._rank, num_own))

        def finish() -> Tensor:
            for _, source in self._steps():
                self._received.await_signal(source)
                total.add_(everyone[self._rank][source])
            return total

        return finish

    def _send(self, part: Tensor, place: Tensor, buffers: "_Buffers", target: int) -> None:
        """Copy a part to its place in the memory of `target`, after all work that has been launched so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            place.copy_(part)
            buffers.signal(target)
        part.record_stream(self._stream)


class _Buffers:
    """Two buffers of each rank, used in turn.

    A rank writes into the buffer of exchange k + 2 after it has received the parts of exchange k + 1, which the other
    ranks send after they have read exchange k. No rank therefore needs to wait before it writes. So a rank must await
    all parts of an exchange, and launch all work that reads them, before it begins the next exchange.
    """

    def __init__(self, group: ProcessGroup, channel: int) -> None:
        self._group, self._channel = group, channel
        self._num_bytes, self._turn = 0, 0

    def next(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return the next buffer of each rank as a tensor. All ranks of the group pass the same shapes."""
        if (num_bytes := math.prod(shape) * dtype.itemsize) > self._num_bytes:
            self._allocate(num_bytes)
        self._turn = 1 - self._turn
        start = self._turn * self._num_bytes // dtype.itemsize
        return [self._memory.get_buffer(rank, shape, dtype, start) for rank in range(self._group.size())]

    def signal(self, rank: int) -> None:
        """Tell a rank that its buffer has this rank's part. Waits until the signal before it has been read."""
        self._memory.put_signal(rank, self._channel)

    def await_signal(self, rank: int) -> None:
        self._memory.wait_signal(rank, self._channel)

    def _allocate(self, num_bytes: int) -> None:
        torch.cuda.synchronize()
        dist.barrier(self._group)  # no rank writes into the old buffers any more
        self._num_bytes = math.ceil(num_bytes / 256) * 256
        device = torch.device("cuda", torch.cuda.current_device())
        self._own = _symmetric_memory.empty(2 * self._num_bytes, dtype=torch.uint8, device=device)
        self._memory = _symmetric_memory.rendezvous(self._own, self._group.group_name)
