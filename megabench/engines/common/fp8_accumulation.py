"""Products of fp8 matrices that cuBLASLt adds to a sum, through nvmath-python.

torch has such a product from version 2.15 on (`torch.nn.functional.scaled_addmm_`).

Sizes: Symbols: M rows, N columns, K inner size of a product.
"""

from typing import Any

from nvmath.linalg.advanced import Matmul
from torch import Tensor

# the plan of each product, by shape and device
_plans: dict[tuple[Any, ...], Matmul] = {}


def add_product(total: Tensor, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> None:
    """Add left [M, K] · right [N, K]ᵀ to `total` [M, N], which is fp32 or bf16, on the current stream."""
    a, b, scales = left, right.t(), {"a": left_scale.reshape(1), "b": right_scale.reshape(1)}
    # cuBLASLt chooses the algorithm of a plan by the alignment of the sum
    key = (total.shape, left.shape[1], total.dtype, total.device, total.data_ptr() % 256)
    if key in _plans:
        _plans[key].reset_operands_unchecked(a=a, b=b, c=total, quantization_scales=scales)
    else:
        product = Matmul(a, b, total, beta=1.0, quantization_scales=scales, options={"inplace": True})
        product.plan()
        _plans[key] = product
    _plans[key].execute(release_workspace=True)
    _plans[key].release_operands()
