"""The precisions that a run can train in: dtypes, loss scaling, peak rate and tolerances of each. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bf16", "fp16", "fp32"]

_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class PrecisionPolicy:
    """How a run computes. Masters and optimizer moments are fp32 under every policy.

    `compute` is the dtype of weights and activations in forward and backward; `products` is the precision of matrix
    products, whose dense peak MFU is measured against. `grad_dtypes` are the dtypes in which gradients may be
    accumulated and reduced. With `scales_loss`, a dynamic loss scale skips steps whose gradients overflow.

    `loss_tolerance` is the largest relative difference of the loss at any step between trials of the same work,
    `grad_norm_tolerance` that of the gradient norm in the median of the first steps; see `study/parity.py`.
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
    def bytes_of_value(self) -> int:
        """The number of bytes of a weight or an activation."""
        return _BYTES[self.compute]

    @property
    def has_masters(self) -> bool:
        """Whether fp32 master weights exist in addition to the weights used for computing."""
        return self.compute != "fp32"

    @property
    def bytes_of_state(self) -> int:
        """The bytes per parameter with AdamW: weight, fp32 gradient, two moments, and any fp32 master weight."""
        return self.bytes_of_value + 4 + 4 * self.has_masters + 8


POLICIES: dict[str, PrecisionPolicy] = {
    policy.name: policy
    for policy in (
        PrecisionPolicy("bf16", "bf16", "bf16", ("fp32", "bf16"), 2e-2, 1e-2),
        PrecisionPolicy("fp16", "fp16", "fp16", ("fp32",), 2e-2, 1e-2, scales_loss=True, needs_gpu=True),
        PrecisionPolicy("fp32", "fp32", "fp32", ("fp32",), 1e-4, 1e-3),
    )
}
