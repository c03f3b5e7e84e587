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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megabench.engines.common.fp8_format import DTYPE, LARGEST, quantization_scale

# cuBLASLt's plan for each product that is added to a tensor, by shape and device: an nvmath.linalg.advanced.Matmul
_plans: dict[tuple[Any, ...], Any] = {}
_AMAX = "_megabench_amax"  # attribute of a tensor: its version and its largest absolute value


class Quantized(NamedTuple):
    """A matrix in fp8. The matrix is `rows` · `scale`, and its transposed matrix is `columns` · `scale`.

    `rows` [M, N] or `columns` [N, M] is empty if it is not needed. `scale` is an fp32 scalar, a power of two.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor


def quantize(tensor: Tensor, rows: bool = True, columns: bool = True, amax: Tensor | None = None) -> Quantized:
    """Quantize a tensor [..., N] as a matrix [M, N], into the layouts `rows` and `columns`.

    On GPUs, the tensor must be bf16 or fp16. `amax` is the largest absolute value, an fp32 scalar, if it is known. It
    is that of the whole tensor if ranks have parts of one tensor. An element that is not finite makes the whole matrix
    NaN.
    """
    amax = largest_value(tensor) if amax is None else amax
    return Quantized(*_quantize(tensor.flatten(0, -2).contiguous(), amax, rows, columns))


def largest_value(tensor: Tensor) -> Tensor:
    """Return the largest absolute value of a tensor as an fp32 scalar."""
    version, amax = (None, None) if torch.compiler.is_compiling() else getattr(tensor, _AMAX, (None, None))
    if amax is None or version != tensor._version:
        amax = _largest_value(tensor.contiguous())
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
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    is_fast: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return left [M, K] · right [N, K]ᵀ as [M, N] in `dtype`, from fp8 matrices and their scales; in `out` if given.

    `is_fast` lets the GPU keep only 14 bits of partial sums. This made gradients 3 to 17% too small, because sums over
    many tokens grow while their terms do not; see "fp8" in benchmarks/NOTES.md. The forward pass tolerates it.
    """
    if left.device.type == "cpu":
        result = (left.float() @ right.float().t() * (left_scale * right_scale)).to(dtype)
        return result if out is None else out.copy_(result)
    into = {} if out is None else {"out": out}
    return torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=dtype, use_fast_accum=is_fast, **into)


def add_product(total: Tensor, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> None:
    """Add left [M, K] · right [N, K]ᵀ to `total` [M, N], which is fp32 or bf16.

    If nvmath-python is installed, cuBLASLt accumulates into `total`. Otherwise, a second kernel adds the product. torch
    can accumulate into it from version 2.15 on (`torch.nn.functional.scaled_addmm_`).
    """
    if total.device.type == "cuda" and has_nvmath():
        _accumulate_product(total, left, left_scale, right, right_scale)
    else:
        total += product(left, left_scale, right, right_scale, total.dtype)


def _accumulate_product(total: Tensor, left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> None:
    """Add a product of fp8 matrices to `total` through nvmath-python, on the current stream."""
    a, b, scales = left, right.t(), {"a": left_scale.reshape(1), "b": right_scale.reshape(1)}
    # cuBLASLt chooses the algorithm of a plan by the memory alignment of `total`
    key = (total.shape, left.shape[1], total.dtype, total.device, total.data_ptr() % 256)
    if key in _plans:
        _plans[key].reset_operands_unchecked(a=a, b=b, c=total, quantization_scales=scales)
    else:
        from nvmath.linalg.advanced import Matmul

        product = Matmul(a, b, total, beta=1.0, quantization_scales=scales, options={"inplace": True})
        product.plan()
        _plans[key] = product
    _plans[key].execute(release_workspace=True)
    _plans[key].release_operands()


@functools.cache
def has_nvmath() -> bool:
    """Return whether nvmath-python is installed."""
    return find_spec("nvmath") is not None


class CastsWeight(nn.Module):
    """A layer whose weight [N, K] is cast to fp8 once per step, in both layouts or in rows only.

    A layer that `has_bf16_gradients` does not need columns. A layer that does not keep them (`keeps_transposed`)
    transposes the rows in each backward pass. `forget_casts` must be called between two steps, because the weights
    change.
    """

    weight: Tensor
    has_bf16_gradients: bool
    keeps_transposed: bool
    _cast: Quantized | None = None

    def largest_value(self, tensor: Tensor) -> Tensor:
        """Return the largest absolute value of a tensor that this layer quantizes, as an fp32 scalar.

        A layer that is divided over ranks overrides this method, because all parts of a tensor have one scale.
        """
        return largest_value(tensor)

    def quantized_weight(self, dtype: torch.dtype) -> Quantized:
        """Return the weight in fp8.

        The weight is rounded to `dtype` first, so that the result does not depend on the dtype of its storage.
        """
        if self._cast is None:
            columns = self.keeps_transposed and not self.has_bf16_gradients
            weight = self.weight.detach().to(dtype)
            self._cast = quantize(weight, columns=columns, amax=self.largest_value(weight))
        return self._cast


def forget_casts(model: nn.Module) -> None:
    """Discard the fp8 casts of all weights. The next forward pass creates them again."""
    for module in model.modules():
        if isinstance(module, CastsWeight):
            module._cast = None


class Fp8Weight(Tensor):
    """A weight [N, K] that exists only in fp8, as `rows` · `scale`. Its gradient is a plain tensor in its `dtype`.

    The class declares its parts to torch.compile (see `__tensor_flatten__` in torch's documentation).
    """

    rows: Tensor
    scale: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["Fp8Weight"], rows: Tensor, scale: Tensor, dtype: torch.dtype) -> "Fp8Weight":
        weight: Fp8Weight = Tensor._make_wrapper_subclass(
            cls, rows.shape, strides=rows.stride(), dtype=dtype, device=rows.device
        )
        weight.rows, weight.scale = rows, scale
        return weight

    def __repr__(self) -> str:  # type: ignore[override]  # torch.compile prints it, and no operation reads its elements
        return f"Fp8Weight({list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["rows", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "Fp8Weight":
        return Fp8Weight(parts["rows"], parts["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> "Fp8Weight":
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            raise NotImplementedError(f"{func} of a weight that exists only in fp8")
        weight, *others = args
        return Fp8Weight(func(weight.rows, *others, **(kwargs or {})), weight.scale, weight.dtype)


# Custom operators, which torch.compile does not look into. inductor's own casts to fp8 can produce NaN
# (github.com/pytorch/ao/issues/4652).


@torch.library.custom_op("megabench::fp8_largest_value", mutates_args=())
def _largest_value(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.abs().max().float()
    from megabench.engines.common import triton_kernels

    return triton_kernels.largest_value(tensor)


@_largest_value.register_fake
def _(tensor: Tensor) -> Tensor:
    return tensor.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megabench::fp8_quantize", mutates_args=())
def _quantize(matrix: Tensor, amax: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    if matrix.device.type == "cuda":
        from megabench.engines.common import triton_kernels

        return triton_kernels.quantize(matrix, amax, rows, columns)
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
        from megabench.engines.common import triton_kernels

        return triton_kernels.transposed(matrix)
    return matrix.t().clone(memory_format=torch.contiguous_format)


@_transposed.register_fake
def _(matrix: Tensor) -> Tensor:
    return matrix.new_empty(matrix.shape[1], matrix.shape[0])
