"""The fp8 format and its scales.

The scale of a tensor is the largest power of two that scales its largest absolute value to at most 448. It is computed
from the bits of that value, because an approximate division would round some scales to half of their value.
"""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3, 1.75 · 2⁸
SMALLEST_AMAX = 2.0**-100  # keeps the scale of a tensor of zeros finite

# of fp32
MANTISSA_BITS = 23
MANTISSA = 2**MANTISSA_BITS - 1
INFINITY = 255 << MANTISSA_BITS

# The fp32 exponents of an amax of (1 + f) · 2ᵏ with f ≤ 0.75 and of its scale 2⁸⁻ᵏ are 127 + k and 127 + 8 − k. If f is
# larger, the scale is half of that.
EXPONENT_SUM = 2 * 127 + 8
LARGEST_FRACTION = 3 << (MANTISSA_BITS - 2)


def quantization_scale(amax: Tensor) -> Tensor:
    """Return the scales of tensors with these largest absolute values, as fp32. If a value is not finite: NaN."""
    bits = amax.clamp_min(SMALLEST_AMAX).view(torch.int32)
    exponent = EXPONENT_SUM - (bits >> MANTISSA_BITS) - ((bits & MANTISSA) > LARGEST_FRACTION).int()
    scale = (exponent << MANTISSA_BITS).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan)
