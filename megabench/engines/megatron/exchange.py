"""How tensor-parallel ranks exchange parts of a sequence while they multiply other parts.

A tensor [S, ...] has one part [S/T, ...] per rank. Each of the T ranks gathers the parts of all ranks before a product,
or sums its part over the products of all ranks. `Collectives` does this with one collective per tensor, which overlaps
only with products that do not use the tensor. `Messages` sends one message per part: a rank multiplies the parts that
have arrived while others are on their way, and sends the products of the other ranks' parts before it computes its own
product.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Product = Callable[[slice], Tensor]  # returns the product of some rows of the whole tensor


class Gathering:
    """A whole tensor whose parts arrive in an order that depends on the rank.

    It yields the parts as they arrive, each with its rows in the whole tensor.
    """

    def __init__(self, whole: Tensor, arriving: Iterator[tuple[slice, Tensor]]) -> None:
        self.whole = whole
        self._arriving = arriving

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        return self._arriving

    def wait(self) -> Tensor:
        """Return the whole tensor when all parts have arrived."""
        for _ in self._arriving:
            pass
        return self.whole


class Exchange(ABC):
    """Exchanges parts between the ranks of a group. All ranks call the same methods in the same order."""

    @abstractmethod
    def gather(self, part: Tensor) -> Gathering:
        """Start to gather the parts [S/T, ...] of all ranks."""

    @abstractmethod
    def reduce_scatter(self, product: Product, num_rows: int) -> Callable[[], Tensor]:
        """Compute a product with S = `num_rows` rows, and start to sum it over all ranks.

        Return a function that waits for this rank's part of the sum.
        """

    @abstractmethod
    def largest(self, value: Tensor) -> Tensor:
        """Return the largest magnitude of an fp32 scalar of all ranks, or NaN if a rank has NaN."""


class Alone(Exchange):
    """The exchange of one rank, which has the whole sequence."""

    def gather(self, part: Tensor) -> Gathering:
        return Gathering(part, iter([(slice(0, len(part)), part)]))

    def reduce_scatter(self, product: Product, num_rows: int) -> Callable[[], Tensor]:
        whole = product(slice(0, num_rows))
        return lambda: whole

    def largest(self, value: Tensor) -> Tensor:
        return value


class _OfGroup(Exchange):
    """An exchange between the ranks of a process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()

    def largest(self, value: Tensor) -> Tensor:
        return largest_of(value, self._group)


def largest_of(value: Tensor, group: ProcessGroup) -> Tensor:
    """Return the largest magnitude of an fp32 tensor of all ranks of a group, element by element.

    NCCL's maximum of NaN and a number is the number. The bits of magnitudes are ordered as the magnitudes, and those of
    NaN are the largest.
    """
    bits = value.view(torch.int32) & 0x7FFFFFFF
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


class Collectives(_OfGroup):
    """One all-gather or reduce-scatter per tensor."""

    def gather(self, part: Tensor) -> Gathering:
        whole = part.new_empty(self._size * len(part), *part.shape[1:])
        work = dist.all_gather_into_tensor(whole, part.contiguous(), group=self._group, async_op=True)

        def arriving() -> Iterator[tuple[slice, Tensor]]:
            wait_for_ranks(work)
            yield slice(0, len(whole)), whole

        return Gathering(whole, arriving())

    def reduce_scatter(self, product: Product, num_rows: int) -> Callable[[], Tensor]:
        whole = product(slice(0, num_rows)).contiguous()
        part = whole.new_empty(len(whole) // self._size, *whole.shape[1:])
        work = dist.reduce_scatter_tensor(part, whole, group=self._group, async_op=True)

        def finish() -> Tensor:
            wait_for_ranks(work)
            return part

        return finish


class Messages(_OfGroup):
    """One message of the process group per part.

    Step i sends to the rank i places further and receives from the rank i places before, so that each rank sends and
    receives one part at a time. The sum adds the own part first, and then the others in the order of the steps.
    """

    def gather(self, part: Tensor) -> Gathering:
        part = part.contiguous()
        whole = part.new_empty(self._size * len(part), *part.shape[1:])
        whole[self._rows_of(self._rank, len(part))] = part
        works = []
        for target, source in self._steps():
            sent = dist.isend(part, group=self._group, group_dst=target)
            rows = self._rows_of(source, len(part))
            works.append((rows, sent, dist.irecv(whole[rows], group=self._group, group_src=source)))

        def arriving() -> Iterator[tuple[slice, Tensor]]:
            yield self._rows_of(self._rank, len(part)), part
            for rows, sent, received in works:
                wait_for_ranks(received, sent)
                yield rows, whole[rows]

        return Gathering(whole, arriving())

    def reduce_scatter(self, product: Product, num_rows: int) -> Callable[[], Tensor]:
        num_own = num_rows // self._size
        works = []
        for target, source in self._steps():
            theirs = product(self._rows_of(target, num_own)).contiguous()
            sent = dist.isend(theirs, group=self._group, group_dst=target)
            part = theirs.new_empty(theirs.shape)
            works.append((part, sent, dist.irecv(part, group=self._group, group_src=source)))
        total = product(self._rows_of(self._rank, num_own))

        def finish() -> Tensor:
            nonlocal total
            for part, sent, received in works:
                wait_for_ranks(received, sent)
                total = total + part
            return total

        return finish

    def _steps(self) -> Iterator[tuple[int, int]]:
        """Yield the ranks to which and from which each step moves a part."""
        for step in range(1, self._size):
            yield (self._rank + step) % self._size, (self._rank - step) % self._size

    def _rows_of(self, rank: int, num_rows: int) -> slice:
        return slice(rank * num_rows, (rank + 1) * num_rows)


def wait_for_ranks(*works: dist.Work | None) -> None:
    """Wait for messages or collectives. The watchdog knows this function by its name."""
    for work in works:
        assert work is not None, "this rank belongs to the group"
        work.wait()
