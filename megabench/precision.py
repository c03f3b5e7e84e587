"""Precision policies: dtypes, loss scaling and parity tolerances. This module does not import torch."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bf16", "fp16", "fp32"]
Fp8Recipe = Literal["tensorwise", "bf16-gradients"]
FP8_MULTIPLE = 16  # the sizes of fp8 matrices must be multiples of 16 (cuBLAS documentation, cublasLtMatmul)

# DeepSpeed begins at 2^16. With DeepSpeed's larger initial scale, engines with fp16 gradients skip two of GPT-2's first
# steps, and engines with fp32 gradients skip none. Their work would then differ.
INITIAL_LOSS_SCALE = 2.0**13
LOSS_SCALE_WINDOW = 1000  # LOSS_SCALE_WINDOW and LOSS_SCALE_HYSTERESIS are DeepSpeed's defaults
LOSS_SCALE_HYSTERESIS = 2

_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes, loss scaling and tolerances of one training precision.

    Master weights and optimizer moments are fp32 under every policy. `compute` is the dtype of weights and activations
    in forward and backward. `products` is the precision of matrix products, and MFU is relative to the dense peak of
    that precision. `grad_dtypes` lists the dtypes allowed for gradient accumulation and reduction. If `scales_loss` is
    true, a dynamic loss scale skips steps whose gradients overflow.

    Two trials of one work class are compared by these relative differences, see `study/parity.py`. `loss_tolerance`
    limits the loss at any step, `grad_norm_tolerance` the median of the gradient norm over the first steps. Rounding
    may grow beyond `loss_tolerance` if the losses of the first steps differ by at most `loss_rounding`. Then
    `mean_loss_tolerance` limits the mean loss of many steps.
    """

    name: str
    compute: Dtype
    products: str
    grad_dtypes: tuple[Dtype, ...]
    loss_tolerance: float
    grad_norm_tolerance: float
    loss_rounding: float
    mean_loss_tolerance: float
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


# The tolerances of fp8 apply if two fp8 trials are compared. Such trials agree less closely than bf16 trials: a sum in
# another order can round a value to the next fp8 number, which differs by up to 1/8. Measurements:
# - Llama-3-8B on two H200 GPUs, six steps: the losses of TP2, PP2·VP8, FSDP2 and ZeRO-3 agree within 0.22% in fp8
#   (10.3112 to 10.3342) and within 0.005% in bf16. With 12 layers, the gradient norms of fp8 are within 4% of bf16.
# - A model of 0.5 billion parameters on two H100 GPUs, eight steps: the losses of seven layouts and engines agree to
#   4.8e-4 and the gradient norms to 3.1e-4 (fp8-engines of benchmarks/).
# - llama-tiny on two CPU processes, 20 steps at lr 3e-4, medians of the first ten gradient norms: TP2 and PP2 differ
#   from DP2 by 0.04% at most. If the amax is not reduced over the tensor-parallel group, TP2 differs by 4.5%, and its
#   losses by only 0.4%. The tolerance of the gradient norm is therefore less than 4.5%.
# - Qwen3-0.6B, 200 steps: gradients in E5M2 instead of E4M3 raise the loss from 1.2% to 9.7% above that of bf16.
POLICIES: dict[str, PrecisionPolicy] = {
    policy.name: policy
    for policy in (
        PrecisionPolicy("bf16", "bf16", "bf16", ("fp32", "bf16"), 2e-2, 1e-2, 1e-3, 3e-2),
        PrecisionPolicy("fp16", "fp16", "fp16", ("fp32",), 2e-2, 1e-2, 1e-3, 3e-2, scales_loss=True, needs_gpu=True),
        PrecisionPolicy("fp8", "bf16", "fp8", ("fp32", "bf16"), 2e-2, 3e-2, 5e-3, 3e-2),
        PrecisionPolicy("fp32", "fp32", "fp32", ("fp32",), 1e-4, 1e-3, 2e-6, 2e-2),
    )
}
