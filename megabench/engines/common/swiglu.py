"""SwiGLU (arXiv 2002.05202). On GPUs, Triton kernels read each input once.

Layers with fp8 products need the largest absolute values of their inputs and output gradients. In front of such layers,
the kernels compute these values on the way, which saves reading the tensors once more.

Sizes: Symbols: F width of the output.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabench.engines.common.fp8 import largest_value, remember_largest_value


def swiglu(*inputs: Tensor, finds_amax: bool = False) -> Tensor:
    """Return silu(gate) · up as [..., F], given both in one tensor [..., 2F], the gate first, or in two [..., F].

    If `finds_amax` is true, `fp8.largest_value` knows the values of the output and of the gradients of `inputs`.
    """
    output: Tensor = _SwiGLU.apply(finds_amax, *inputs)
    return output


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, finds_amax: bool, *inputs: Tensor) -> Tensor:
        inputs = tuple(part.contiguous() for part in inputs)
        ctx.save_for_backward(*inputs)
        ctx.finds_amax = finds_amax
        gate, up = _halves(inputs)
        if gate.device.type == "cpu":
            output = F.silu(gate) * up
            amax = largest_value(output) if finds_amax else None
        else:
            from megabench.engines.common import triton_kernels  # only GPU builds of torch include Triton

            output = gate.new_empty(gate.shape)
            amax = gate.new_zeros((), dtype=torch.float32) if finds_amax else None
            triton_kernels.swiglu_forward(_matrix(gate), _matrix(up), _matrix(output), amax)
        if amax is not None:
            remember_largest_value(output, amax)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        grads = tuple(torch.empty_like(part) for part in inputs)
        (gate, up), (gate_grad, up_grad) = _halves(inputs), _halves(grads)
        if gate.device.type == "cpu":
            gate_grad.copy_(torch.ops.aten.silu_backward(grad * up, gate))
            up_grad.copy_(grad * F.silu(gate))
            amaxes = torch.stack([largest_value(part) for part in grads]) if ctx.finds_amax else None
        else:
            from megabench.engines.common import triton_kernels

            amaxes = grad.new_zeros(len(grads), dtype=torch.float32) if ctx.finds_amax else None
            matrices = (_matrix(gate), _matrix(up), _matrix(grad.contiguous()), _matrix(gate_grad), _matrix(up_grad))
            triton_kernels.swiglu_backward(*matrices, amaxes)
        if amaxes is not None:
            for part, amax in zip(grads, amaxes, strict=True):
                remember_largest_value(part, amax)
        return None, *grads


def _halves(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors if len(tensors) == 2 else tensors[0].chunk(2, dim=-1)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2)
