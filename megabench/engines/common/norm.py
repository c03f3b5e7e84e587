"""Root-mean-square norm (arXiv 1910.07467), alone or after an addition, with one kernel per pass on GPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabench.engines.common.fp8 import remember_largest_value

NARROW = 1024  # for smaller H, as in query and key norms, torch's kernel is used, which processes several rows at once


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of hidden [..., H]. The kernel also stores the amax of the result for `fp8.largest_value`."""
    if _uses_torch(hidden, weight):
        return F.rms_norm(hidden, weight.shape, weight, eps)
    normed: Tensor = _Norm.apply(hidden, None, weight, eps)
    return normed


def norm_of_sum(left: Tensor, right: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return left + right and the RMSNorm of this sum. Inputs and outputs are [..., H].

    The kernels also compute the amax of the normalized sum, and that of the gradient with respect to the sum, and store
    them where `fp8.largest_value` finds them.
    """
    if _uses_torch(left, weight):
        total = left + right
        return total, F.rms_norm(total, weight.shape, weight, eps)
    normed, total = _Norm.apply(left, right, weight, eps)
    return total, normed


def _uses_torch(hidden: Tensor, weight: Tensor) -> bool:
    # torch.compile fuses torch's operations, but not a Triton kernel
    return hidden.device.type == "cpu" or weight.numel() < NARROW or torch.compiler.is_compiling()


class _Norm(torch.autograd.Function):
    """Returns the RMSNorm of `left`; or, if `right` is given, the RMSNorm of left + right, and left + right."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        from megabench.engines.common import triton_kernels  # only GPU builds of torch include Triton

        left = left.contiguous()
        total = left if right is None else torch.empty_like(left)
        normed, amax = torch.empty_like(left), left.new_zeros((), dtype=torch.float32)
        right = None if right is None else right.contiguous()
        inverse_rms = triton_kernels.norm_forward(left, right, weight, eps, total, normed, amax)
        ctx.save_for_backward(total, weight, inverse_rms)
        remember_largest_value(normed, amax)
        return normed if right is None else (normed, total)

    @staticmethod
    def backward(ctx: Any, grad_normed: Tensor, grad_total: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from megabench.engines.common import triton_kernels

        total, weight, inverse_rms = ctx.saved_tensors
        grad, amax = torch.empty_like(total), total.new_zeros((), dtype=torch.float32)
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_weight = triton_kernels.norm_backward(
            grad_normed.contiguous(), grad_total, total, weight, inverse_rms, grad, amax
        )
        remember_largest_value(grad, amax)
        return grad, None if grad_total is None else grad, grad_weight.to(weight.dtype), None
