"""Quantization to fp8 and products of fp8 matrices, with Triton kernels on GPUs and with torch on CPU.

A tensor has one scale, which is computed from the tensor itself ("current scaling"). If the tensor is divided over
ranks, all parts have the scale of the whole tensor. All tensors are E4M3, gradients included. Scales are powers of two
(as in DeepSeek-V3, arXiv 2412.19437, section 3.3). Fused weights are therefore rounded as unfused weights are, except
for elements below 2⁻¹⁴ of the largest element.

The product of cuBLASLt on Hopper needs both operands in the order of the inner dimension. A matrix that is used in two
products is written twice, as it is and transposed, from one read.

Sizes: Symbols: M rows, N columns, K inner size of a product.
"""

import functools
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.engines.common.fp8_format import DTYPE, LARGEST, quantization_scale

_AMAX = "_megabench_amax"  # attribute of a tensor: its version and its largest absolute value


class Quantized(NamedTuple):
    """A matrix in fp8. The matrix is `rows` · `scale`, and its transposed matrix is `columns` · `scale`.

    `rows` [M, N] or `columns` [N, M] is empty if it is not needed. `scale` is an fp32 scalar, a power of two.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor


def quantize(
    tensor: Tensor,
    rows: bool = True,
    columns: bool = True,
    amax: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Quantized:
    """Quantize a tensor [..., N] as a matrix [M, N], into the layouts `rows` and `columns`.

    On GPUs, the tensor must be bf16 or fp16. `amax` is the largest absolute value, an fp32 scalar, if it is known. If
    the ranks of `group` have parts of one tensor, all parts get the scale of the whole tensor. An element that is not
    finite makes the whole matrix NaN.
    """
    amax = largest_value(tensor, group) if amax is None else amax
    return Quantized(*_quantize(tensor.flatten(0, -2).contiguous(), amax, rows, columns))


def largest_value(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the largest absolute value of a tensor, over all ranks of `group`, as an fp32 scalar."""
    version, amax = (None, None) if torch.compiler.is_compiling() else getattr(tensor, _AMAX, (None, None))
    if amax is None or version != tensor._version:
        amax = _largest_value(tensor.contiguous())
    elif group is not None:
        amax = amax.clone()
    if group is not None:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def remember_largest_value(tensor: Tensor, amax: Tensor) -> None:
    """Make `largest_value` return `amax` for this tensor, until the tensor changes. Views do not inherit the value."""
    setattr(tensor, _AMAX, (tensor._version, amax))


def columns_of(matrix: Quantized) -> Tensor:
    """Return `columns`, transposed from the rows if they do not exist."""
    return matrix.columns if matrix.columns.numel() else transposed(matrix.rows)


def transposed(matrix: Tensor) -> Tensor:
    """Transpose an fp8 matrix in memory, [M, N] -> [N, M]."""
    return _transposed(matrix)


def product(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype, is_fast: bool = False
) -> Tensor:
    """Return left [M, K] · right [N, K]ᵀ as [M, N] in `dtype`, from fp8 matrices and their scales.

    `is_fast` lets the GPU keep only 14 bits of partial sums. This made gradients 3 to 17% too small, because sums over
    many tokens grow while their terms do not; see "fp8" in benchmarks/NOTES.md. The forward pass tolerates it.
    """
    if left.device.type == "cpu":
        return (left.float() @ right.float().t() * (left_scale * right_scale)).to(dtype)
    return torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=dtype, use_fast_accum=is_fast)


def add_product(total: Tensor, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> None:
    """Add left [M, K] · right [N, K]ᵀ to `total` [M, N].

    If nvmath-python is installed, cuBLASLt accumulates into `total`. Otherwise, a second kernel adds the product.
    """
    if total.device.type == "cuda" and has_nvmath():
        from megabench.engines.common import fp8_accumulation

        fp8_accumulation.add_product(total, left, left_scale, right, right_scale)
    else:
        total += product(left, left_scale, right, right_scale, total.dtype)


@functools.cache
def has_nvmath() -> bool:
    """Return whether nvmath-python is installed."""
    return find_spec("nvmath") is not None


# Custom operators, which torch.compile does not look into. inductor's own casts to fp8 can produce NaN
# (github.com/pytorch/ao/issues/4652).


@torch.library.custom_op("megabench::fp8_largest_value", mutates_args=())
def _largest_value(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.abs().max().float()
    from megabench.engines.common import fp8_kernels

    return fp8_kernels.largest_value(tensor)


@_largest_value.register_fake
def _(tensor: Tensor) -> Tensor:
    return tensor.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megabench::fp8_quantize", mutates_args=())
def _quantize(matrix: Tensor, amax: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    if matrix.device.type == "cuda":
        from megabench.engines.common import fp8_kernels

        return fp8_kernels.quantize(matrix, amax, rows, columns)
    scale = quantization_scale(amax)
    values = (matrix.float() * scale).clamp(-LARGEST, LARGEST).to(DTYPE)
    empty = values.new_empty(0)
    flipped = values.t().clone(memory_format=torch.contiguous_format) if columns else empty
    return values if rows else empty, flipped, 1 / scale


@_quantize.register_fake
def _(matrix: Tensor, amax: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_columns = matrix.shape
    as_is = matrix.new_empty((num_rows, num_columns) if rows else 0, dtype=DTYPE)
    transposed = matrix.new_empty((num_columns, num_rows) if columns else 0, dtype=DTYPE)
    return as_is, transposed, matrix.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megabench::fp8_transposed", mutates_args=())
def _transposed(matrix: Tensor) -> Tensor:
    if matrix.device.type == "cuda":
        from megabench.engines.common import fp8_kernels

        return fp8_kernels.transposed(matrix)
    return matrix.t().clone(memory_format=torch.contiguous_format)


@_transposed.register_fake
def _(matrix: Tensor) -> Tensor:
    return matrix.new_empty(matrix.shape[1], matrix.shape[0])
