"""Messages between tensor-parallel ranks of one NVLink domain, which the GPUs' copy engines move.

A rank writes its part into the memory of another rank (torch's symmetric memory) on a second stream, and then sets a
signal there. The multiprocessors are free for the products meanwhile. CUDA_DEVICE_MAX_CONNECTIONS must not be 1: with
one hardware queue, products would wait behind copies and signals.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, _symmetric_memory

from megabench.engines.megatron.exchange import Gathering, Messages, Product
from megabench.runtime.device import count_symmetric_memory
from megabench.runtime.peer_copies import count_copy


@cache
def copy_engines(group: ProcessGroup) -> "CopyEngines":
    """Return the exchange of a group. All layers share its buffers."""
    return CopyEngines(group)


class CopyEngines(Messages):
    """Messages in the order of `Messages`, through buffers in symmetric memory."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1", "copies need a hardware queue of their own"
        self._order, self._ranks = list(self._steps()), tuple(dist.get_process_group_ranks(group))
        self._gathered = _Buffers(group, self._order, channel=0)
        self._summed = _Buffers(group, self._order, channel=1)
        self._scalars = _Scalars(group)
        self._stream = torch.cuda.Stream(priority=-1)

    def gather(self, part: Tensor) -> Gathering:
        part = part.contiguous()
        buffer = self._gathered.next(part.shape, part.dtype)
        with self._copying():
            for (target, _), place in zip(self._order, buffer.places, strict=True):
                self._copy(part, place)
                self._gathered.signal(target)
            buffer.own_place.copy_(part)
            copied = self._stream.record_event()

        def arriving() -> Iterator[tuple[slice, Tensor]]:
            yield self._rows_of(self._rank, len(part)), part
            for (_, source), received in zip(self._order, buffer.received, strict=True):
                self._gathered.await_signal(source)
                yield self._rows_of(source, len(part)), received
            copied.wait()

        return Gathering(buffer.whole, arriving())

    def reduce_scatter(self, product: Product, num_rows: int) -> Callable[[], Tensor]:
        num_own = num_rows // self._size
        buffer: _Buffer | None = None
        sent = []
        for step, (target, _) in enumerate(self._order):
            theirs = product(self._rows_of(target, num_own))
            buffer = buffer or self._summed.next(theirs.shape, theirs.dtype)
            with self._copying():
                self._copy(theirs, buffer.places[step])
                self._summed.signal(target)
                sent.append((theirs, self._stream.record_event()))
        total = product(self._rows_of(self._rank, num_own))

        def finish() -> Tensor:
            nonlocal total
            assert buffer is not None, "a group has two ranks or more"
            for (_, source), received in zip(self._order, buffer.received, strict=True):
                self._summed.await_signal(source)
                total = total + received
            for _, copied in sent:
                copied.wait()
            return total

        return finish

    def largest(self, value: Tensor) -> Tensor:
        return self._scalars.largest(value)

    def _copy(self, part: Tensor, place: Tensor) -> None:
        place.copy_(part)
        count_copy(self._ranks, part.nbytes)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Launch copies and signals on the second stream, after all work that has been launched so far.

        Whoever launches a copy lets the current stream wait for it before it releases what is copied. This costs no
        time, because the other ranks' parts arrive as late. (`Tensor.record_stream` releases memory only when the host
        sees that the copy has ended, which took 5.5 GiB more.)
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


@dataclass(frozen=True)
class _Buffer:
    """A buffer of each rank for one part from every rank, as tensors."""

    whole: Tensor
    """All parts in this rank's buffer."""
    received: list[Tensor]
    """The parts of the other ranks in it, in the order of the steps."""
    places: list[Tensor]
    """The places of this rank's part in the buffers of the other ranks, in the order of the steps."""
    own_place: Tensor
    """The place of this rank's part in its own buffer."""


class _Buffers:
    """Two buffers of each rank, used in turn.

    A rank writes into the buffer of exchange k + 2 after it has received the parts of exchange k + 1, which the other
    ranks send after they have read exchange k. No rank therefore needs to wait before it writes. So a rank must await
    all parts of an exchange, and launch all work that reads them, before it begins the next exchange.
    """

    def __init__(self, group: ProcessGroup, order: list[tuple[int, int]], channel: int) -> None:
        self._group, self._order, self._channel = group, order, channel
        self._num_bytes, self._turn = 0, 0
        self._buffers: dict[tuple[int, torch.Size, torch.dtype], _Buffer] = {}  # tensors take the host long to create

    def next(self, shape: torch.Size, dtype: torch.dtype) -> _Buffer:
        """Return the next buffer, for parts of this shape. All ranks of the group pass the same shapes."""
        self._turn = 1 - self._turn
        key = (self._turn, shape, dtype)
        if key not in self._buffers:
            num_bytes = self._group.size() * shape.numel() * dtype.itemsize
            if num_bytes > self._num_bytes:
                self._allocate(num_bytes)
            self._buffers[key] = self._buffer(*key)
        return self._buffers[key]

    def signal(self, rank: int) -> None:
        """Tell a rank that its buffer has this rank's part. Waits until the signal before it has been read."""
        self._memory.put_signal(rank, self._channel)

    def await_signal(self, rank: int) -> None:
        self._memory.wait_signal(rank, self._channel)

    def _buffer(self, turn: int, shape: torch.Size, dtype: torch.dtype) -> _Buffer:
        rank, size, start = self._group.rank(), self._group.size(), turn * self._num_bytes // dtype.itemsize
        everyone = [self._memory.get_buffer(other, (size, *shape), dtype, start) for other in range(size)]
        own = everyone[rank]
        return _Buffer(
            own.flatten(0, 1),
            [own[source] for _, source in self._order],
            [everyone[target][rank] for target, _ in self._order],
            own[rank],
        )

    def _allocate(self, num_bytes: int) -> None:
        torch.cuda.synchronize()
        dist.barrier(self._group)  # no rank writes into the old buffers any more
        self._buffers.clear()
        num_bytes = math.ceil(num_bytes / 256) * 256
        count_symmetric_memory(2 * (num_bytes - self._num_bytes))
        self._num_bytes = num_bytes
        device = torch.device("cuda", torch.cuda.current_device())
        self._own = _symmetric_memory.empty(2 * self._num_bytes, dtype=torch.uint8, device=device)
        self._memory = _symmetric_memory.rendezvous(self._own, self._group.group_name)


class _Scalars:
    """Two slots of each rank for a scalar from every rank, used in turn.

    A message of 8 bytes has the scalar and the number of the exchange, so that it needs no signal.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._rank, self._size, self._number = group.rank(), group.size(), 0
        device = torch.device("cuda", torch.cuda.current_device())
        self._slots = _symmetric_memory.empty(2 * self._size, dtype=torch.int64, device=device)
        memory = _symmetric_memory.rendezvous(self._slots.zero_(), group.group_name)
        self._addresses = torch.tensor(memory.buffer_ptrs, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        dist.barrier(group)  # no rank writes before the slots of all ranks are zero

    def largest(self, value: Tensor) -> Tensor:
        from megabench.engines.megatron import scalar_kernel  # only GPU builds of torch include Triton

        self._number += 1
        return scalar_kernel.largest(value, self._addresses, self._rank, self._size, self._number)
