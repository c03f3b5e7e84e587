"""Accumulate weight gradients inside their matrix product, in the dtype of the sum."""

import torch
from torch import Tensor


def accumulate(total: Tensor, grads: Tensor, inputs: Tensor, factor: float = 1.0) -> None:
    """Add factor · gradsᵀ [V, C] · inputs [C, H] to total [V, H], which is fp32 or has the dtype of the inputs.

    On a GPU, the matrix product adds to the sum directly, without rounding or storing the product.
    """
    if total.device.type == "cuda" and total.dtype != inputs.dtype:
        torch.addmm(total, grads.t(), inputs, alpha=factor, out_dtype=total.dtype, out=total)
    elif total.device.type == "cuda" or total.dtype == inputs.dtype:
        torch.addmm(total, grads.t(), inputs, alpha=factor, out=total)
    else:
        total.add_(grads.t() @ inputs, alpha=factor)
