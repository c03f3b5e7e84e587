"""Weight gradients summed up as their product is made, in the dtype of the sum."""

import torch
from torch import Tensor


def accumulate(total: Tensor, grads: Tensor, inputs: Tensor) -> None:
    """total [V, H], in fp32 or the dtype of the others, += gradsᵀ [V, C] · inputs [C, H].

    On a GPU the product itself adds to the sum: it is not rounded first, not written, and not read again.
    """
    if total.device.type == "cuda" and total.dtype != inputs.dtype:
        torch.addmm(total, grads.t(), inputs, out_dtype=total.dtype, out=total)
    elif total.device.type == "cuda" or total.dtype == inputs.dtype:
        torch.addmm(total, grads.t(), inputs, out=total)
    else:
        total += grads.t() @ inputs
