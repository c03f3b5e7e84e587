"""Precision policies: dtypes, loss scaling and parity tolerances. This module does not import torch."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bf16", "fp16", "fp32"]
Fp8Recipe = Literal["tensorwise", "bf16-gradients"]
FP8_MULTIPLE = 16  # the sizes of fp8 matrices must be multiples of 16 (cuBLAS documentation, cublasLtMatmul)

_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes, loss scaling and tolerances of one training precision.

    Master weights and optimizer moments are fp32 under every policy. `compute` is the dtype of weights and activations
    in forward and backward. `products` is the precision of matrix products, and MFU is relative to the dense peak of
    that precision. `grad_dtypes` lists the dtypes allowed for gradient accumulation and reduction. If `scales_loss` is
    true, a dynamic loss scale skips steps whose gradients overflow.

    `loss_tolerance` is the largest allowed relative difference of the loss at any step between two trials of one work
    class. `grad_norm_tolerance` limits the median relative difference of the gradient norm over the first steps. See
    `study/parity.py`.
    """

    name: str
    compute: Dtype
    products: str
    grad_dtypes: tuple[Dtype, ...]
    loss_tolerance: float
    grad_norm_tolerance: float
    scales_loss: bool = False
    needs_gpu: bool = False

    @property
    def has_fp8_products(self) -> bool:
        return self.products == "fp8"

    @property
    def bytes_of_value(self) -> int:
        """Bytes per element of a weight or an activation."""
        return _BYTES[self.compute]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer keeps fp32 master weights in addition to the compute weights."""
        return self.compute != "fp32"

    @property
    def bytes_of_state(self) -> int:
        """Bytes per parameter with AdamW: weight, fp32 gradient, two fp32 moments, and fp32 master weight if kept."""
        return self.bytes_of_value + 4 + 4 * self.has_masters + 8


POLICIES: dict[str, PrecisionPolicy] = {
    policy.name: policy
    for policy in (
        PrecisionPolicy("bf16", "bf16", "bf16", ("fp32", "bf16"), 2e-2, 1e-2),
        PrecisionPolicy("fp16", "fp16", "fp16", ("fp32",), 2e-2, 1e-2, scales_loss=True, needs_gpu=True),
        PrecisionPolicy("fp8", "bf16", "fp8", ("fp32", "bf16"), 2e-2, 5e-2),
        PrecisionPolicy("fp32", "fp32", "fp32", ("fp32",), 1e-4, 1e-3),
    )
}
