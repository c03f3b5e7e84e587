"""The Triton kernels of swiglu.py. They read each input once, and compute in fp32.

All tensors are contiguous matrices [M, F], or halves [M, F] of one contiguous matrix [M, 2F].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabench.engines.common.fp8_kernels import magnitude

_BLOCK = 1024  # elements per step of a program: 16 bytes of bf16 for each of 128 threads


def forward(gate: Tensor, up: Tensor, output: Tensor, amax: Tensor | None) -> None:
    """Write silu(gate) · up to `output`, and its largest absolute value to the fp32 scalar `amax`, which is zero."""
    num_rows, width = output.shape
    _forward[(num_rows,)](
        gate, up, output, _bits(amax), width, gate.stride(0), HAS_AMAX=amax is not None, BLOCK=_BLOCK
    )  # fmt: skip


def backward(gate: Tensor, up: Tensor, grad: Tensor, gate_grad: Tensor, up_grad: Tensor, amaxes: Tensor | None) -> None:
    """Write the gradients of `gate` and `up`, given that of the output.

    `amaxes` contains zeros in fp32, for the largest absolute value of each gradient, or one zero for that of both.
    """
    num_rows, width = grad.shape
    bits = _bits(amaxes)
    gate_amax, up_amax = (None, None) if bits is None else (bits[:1], bits[-1:])
    _backward[(num_rows,)](
        gate, up, grad, gate_grad, up_grad, gate_amax, up_amax, width, gate.stride(0),
        HAS_AMAX=bits is not None, BLOCK=_BLOCK,
    )  # fmt: skip


def _bits(amax: Tensor | None) -> Tensor | None:
    return None if amax is None else amax.view(torch.int32)


@triton.jit
def _forward(gate, up, output, amax, width, stride, HAS_AMAX: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # one program per row, because the updates of amax are sequential
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        gates = tl.load(gate + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        ups = tl.load(up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        result = (gates * tl.sigmoid(gates) * ups).to(output.dtype.element_ty)
        tl.store(output + row * width + columns, result, mask=inside)
        if HAS_AMAX:
            largest = tl.maximum(largest, magnitude(result))
    if HAS_AMAX:
        tl.atomic_max(amax, tl.max(largest))


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gate, up, grad, gate_grad, up_grad, gate_amax, up_amax, width, stride,
    HAS_AMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest_gate = tl.zeros([BLOCK], tl.int32)
    largest_up = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        places = row * stride + columns
        gates = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
        ups = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
        grads = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gates)
        silu = gates * share
        slope = share + silu * (1 - share)  # of silu
        for_gate = (grads * ups * slope).to(gate_grad.dtype.element_ty)
        for_up = (grads * silu).to(up_grad.dtype.element_ty)
        tl.store(gate_grad + places, for_gate, mask=inside)
        tl.store(up_grad + places, for_up, mask=inside)
        if HAS_AMAX:
            largest_gate = tl.maximum(largest_gate, magnitude(for_gate))
            largest_up = tl.maximum(largest_up, magnitude(for_up))
    if HAS_AMAX:
        tl.atomic_max(gate_amax, tl.max(largest_gate))
        tl.atomic_max(up_amax, tl.max(largest_up))
