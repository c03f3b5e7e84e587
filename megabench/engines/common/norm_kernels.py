"""The Triton kernels of norm.py. They read each input once, and compute in fp32.

Sizes: Symbols: M tokens, H hidden size. All tensors are contiguous, with M·H elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabench.engines.common.fp8_kernels import magnitude

_PROGRAMS_PER_PROCESSOR = 2  # in the backward pass, where each program sums up the weight gradients of many rows


def forward(
    left: Tensor, right: Tensor | None, weight: Tensor, eps: float, total: Tensor, normed: Tensor, amax: Tensor
) -> Tensor:
    """Write left + right to `total`, and the RMSNorm of `total` to `normed`. Without `right`, `total` is `left`.

    `amax` is an fp32 scalar that contains zero. The kernel replaces it by the largest absolute value of `normed`.
    Return the inverse root-mean-squares [M] in fp32.
    """
    width = weight.numel()
    num_rows = left.numel() // width
    inverse_rms = torch.empty(num_rows, dtype=torch.float32, device=left.device)
    _forward[(num_rows,)](
        left, right, weight, total, normed, inverse_rms, amax.view(torch.int32), width, eps,
        HAS_SUM=right is not None, BLOCK=triton.next_power_of_2(width), num_warps=_num_warps(width),
    )  # fmt: skip
    return inverse_rms


def backward(
    grad_normed: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    grad: Tensor,
    amax: Tensor,
) -> Tensor:
    """Write the gradient of `total` to `grad`, given those of `normed` and of `total` as a result of `forward`.

    `amax` is an fp32 scalar that contains zero. The kernel replaces it by the largest absolute value of `grad`. Return
    the gradient of the weight, [H] in fp32.
    """
    width = weight.numel()
    num_rows = inverse_rms.numel()
    num_processors = torch.cuda.get_device_properties(total.device).multi_processor_count
    num_programs = min(num_rows, _PROGRAMS_PER_PROCESSOR * num_processors)
    grad_weights = torch.empty(num_programs, width, dtype=torch.float32, device=total.device)
    _backward[(num_programs,)](
        grad_normed, grad_total, total, weight, inverse_rms, grad, grad_weights, amax.view(torch.int32),
        num_rows, width,
        HAS_SUM=grad_total is not None, BLOCK=triton.next_power_of_2(width), num_warps=_num_warps(width),
    )  # fmt: skip
    return grad_weights.sum(0)


def _num_warps(width: int) -> int:
    return min(max(triton.next_power_of_2(width) // 512, 1), 16)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    left, right, weight, total, normed, inverse_rms, amax, width, eps, HAS_SUM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    values = tl.load(left + places, mask=inside, other=0.0)
    if HAS_SUM:
        added = values.to(tl.float32) + tl.load(right + places, mask=inside, other=0.0).to(tl.float32)
        values = added.to(values.dtype)  # the backward pass reads the rounded sum
        tl.store(total + places, values, mask=inside)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(inverse_rms + row, scale)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = (values * scale * weights).to(normed.dtype.element_ty)
    tl.store(normed + places, result, mask=inside)
    tl.atomic_max(amax, tl.max(magnitude(result)))


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad_normed, grad_total, total, weight, inverse_rms, grad, grad_weights, amax, num_rows, width,
    HAS_SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.int32)
    for row in range(tl.program_id(0).to(tl.int64), num_rows, tl.num_programs(0)):
        places = row * width + columns
        scale = tl.load(inverse_rms + row)
        units = tl.load(total + places, mask=inside, other=0.0).to(tl.float32) * scale
        grads = tl.load(grad_normed + places, mask=inside, other=0.0).to(tl.float32)
        sums += grads * units
        grads *= weights
        result = scale * (grads - units * (tl.sum(grads * units) / width))
        if HAS_SUM:
            result += tl.load(grad_total + places, mask=inside, other=0.0).to(tl.float32)
        rounded = result.to(grad.dtype.element_ty)
        tl.store(grad + places, rounded, mask=inside)
        largest = tl.maximum(largest, magnitude(rounded))
    tl.store(grad_weights + tl.program_id(0) * width + columns, sums, mask=inside)
    tl.atomic_max(amax, tl.max(largest))
