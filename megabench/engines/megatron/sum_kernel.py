"""The Triton kernel that adds the parts of a sum that other ranks have sent.

Only GPU builds of torch include Triton. Import this module only on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # elements of each program


def sum_of_parts(own: Tensor, received: Tensor, rank: int) -> Tensor:
    """Return the sum of this rank's part [R, ...] and those of the others, in fp32 and rounded once.

    `received` [T·R, ...] has a place for the part of each of the T ranks. That of `rank` is not read.
    """
    own, total = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
    num_elements = own.numel()
    grid = (triton.cdiv(num_elements, _BLOCK),)
    add_parts[grid](own, received, total, num_elements, RANK=rank, SIZE=len(received) // len(own), BLOCK=_BLOCK)
    return total


@triton.jit(do_not_specialize=["num_elements"])
def add_parts(own, received, total, num_elements, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    num_elements = num_elements.to(tl.int64)
    exists = places < num_elements
    result = tl.load(own + places, mask=exists).to(tl.float32)
    for step in tl.static_range(1, SIZE):
        part = received + (RANK - step + SIZE) % SIZE * num_elements
        result += tl.load(part + places, mask=exists).to(tl.float32)
    tl.store(total + places, result.to(total.dtype.element_ty), mask=exists)
