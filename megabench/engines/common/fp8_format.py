"""The fp8 format and its scales."""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
SMALLEST_AMAX = 2.0**-100  # keeps the scale of a tensor of zeros finite
EXPONENT_BITS = 0x7F800000  # of fp32


def quantization_scale(amax: Tensor) -> Tensor:
    """Return the largest power of two that scales `amax` to at most 448, as fp32."""
    scale = LARGEST / amax.clamp_min(SMALLEST_AMAX)
    return (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
