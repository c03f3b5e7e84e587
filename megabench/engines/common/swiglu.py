"""SwiGLU (arXiv 2002.05202) of one tensor that contains the gate and the up projection.

torch.compile fuses the forward pass into one kernel that reads each input once. The backward pass is written in Triton,
because torch.compile's kernel would read each input twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megabench.engines.common.fused import fused

_BLOCK = 1024  # elements per program: 16 bytes of bf16 for each of 128 threads


class SwiGLU(MegatronModule):
    """An activation of gate and up in one tensor, with the interface of Transformer Engine's activations."""

    def forward(self, both: Tensor) -> Tensor:
        return swiglu(both)


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) · up: [..., 2F], the gate first -> [..., F]."""
    if both.device.type == "cuda":
        output: Tensor = _SwiGLU.apply(both)
        return output
    return _swiglu(both)


def _swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        output: Tensor = fused(_swiglu, both)(both)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        from megabench.engines.megatron.swiglu_kernel import backward  # only GPU builds of torch include Triton

        (both,) = ctx.saved_tensors
        grad, result, width = grad.contiguous(), torch.empty_like(both), grad.shape[-1]
        programs = (grad.numel() // width, -(-width // _BLOCK))
        backward[programs](both, grad, result, width, BLOCK=_BLOCK)
        return result
