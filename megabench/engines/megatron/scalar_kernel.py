"""The Triton kernel that exchanges a scalar between the GPUs of one NVLink domain.

Only GPU builds of torch include Triton. Import this module only on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # the bits of an fp32 number without its sign, which are ordered as the numbers


def largest(value: Tensor, addresses: Tensor, rank: int, size: int, number: int) -> Tensor:
    """Return the largest of an fp32 scalar of all ranks, in exchange `number` (from 1 on) of these ranks.

    `addresses` [size] are the addresses of the slots of each rank: two times `size` messages of 8 bytes, zero at first.
    """
    result = torch.empty_like(value)
    exchange_largest[(1,)](value.view(torch.int32), result.view(torch.int32), addresses, rank, number, SIZE=size)
    return result


@triton.jit(do_not_specialize=["rank", "number"])
def exchange_largest(value, result, addresses, rank, number, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    mine = tl.load(value) & _MAGNITUDE
    message = (number.to(tl.int64) << 32) | mine.to(tl.int64)
    first = (number % 2) * SIZE
    for other in range(SIZE):
        slots = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(slots + first + rank, message, sem="release", scope="sys")
    slots = tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + first
    for other in range(SIZE):
        found = tl.atomic_add(slots + other, 0, sem="acquire", scope="sys")
        while (found >> 32) != number:
            found = tl.atomic_add(slots + other, 0, sem="acquire", scope="sys")
        mine = tl.maximum(mine, (found & _MAGNITUDE).to(tl.int32))
    tl.store(result, mine)
