"""The Triton kernels of fp8.py, norm.py and swiglu.py. They read each input once, and compute in fp32.

Only GPU builds of torch include Triton. Import this module only for tensors on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabench.engines.common import fp8_format
from megabench.engines.common.fp8_format import DTYPE

_BLOCK, _BLOCKS = 1024, 8  # elements per block; blocks per program that finds a largest value
_TILE = (64, 256)  # rows and columns of a matrix per program that quantizes or transposes
# in the backward pass of the norm, where each program sums up the weight gradients of many rows
_PROGRAMS_PER_PROCESSOR = 2

# kernels can read global variables only as constants
_MANTISSA_BITS, _MANTISSA = tl.constexpr(fp8_format.MANTISSA_BITS), tl.constexpr(fp8_format.MANTISSA)
_EXPONENT_SUM, _INFINITY = tl.constexpr(fp8_format.EXPONENT_SUM), tl.constexpr(fp8_format.INFINITY)
_LARGEST_FRACTION = tl.constexpr(fp8_format.LARGEST_FRACTION)
_LARGEST, _SMALLEST_AMAX = tl.constexpr(fp8_format.LARGEST), tl.constexpr(fp8_format.SMALLEST_AMAX)


# Kernels of fp8.py. Symbols: M rows, N columns.


def largest_value(tensor: Tensor) -> Tensor:
    """Return the largest absolute value of a contiguous tensor as an fp32 scalar."""
    amax = torch.zeros((), dtype=torch.float32, device=tensor.device)
    programs = (triton.cdiv(tensor.numel(), _BLOCK * _BLOCKS),)
    _largest_value[programs](tensor, amax.view(torch.int32), tensor.numel(), BLOCK=_BLOCK, BLOCKS=_BLOCKS)
    return amax


def quantize(matrix: Tensor, amax: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrix [M, N] in fp8, its transposed matrix, and their scale; see `fp8.quantize`."""
    assert matrix.element_size() == 2, "Triton 3.6 transposes values that come from fp32 wrongly"
    num_rows, num_columns = matrix.shape
    as_is = matrix.new_empty((num_rows, num_columns) if rows else 0, dtype=DTYPE)
    transposed = matrix.new_empty((num_columns, num_rows) if columns else 0, dtype=DTYPE)
    scale = torch.empty_like(amax)
    _quantize[_tiles(num_rows, num_columns)](
        matrix, amax, as_is, transposed, scale, num_rows, num_columns,
        ROWS=rows, COLUMNS=columns, TILE_M=_TILE[0], TILE_N=_TILE[1],
    )  # fmt: skip
    return as_is, transposed, scale


def transposed(matrix: Tensor) -> Tensor:
    """Return a contiguous fp8 matrix [M, N] as [N, M]."""
    num_rows, num_columns = matrix.shape
    result = matrix.new_empty(num_columns, num_rows)
    _transpose[_tiles(num_rows, num_columns)](
        matrix.view(torch.uint8), result.view(torch.uint8), num_rows, num_columns, TILE_M=_TILE[0], TILE_N=_TILE[1]
    )
    return result


def _tiles(num_rows: int, num_columns: int) -> tuple[int, int]:
    return triton.cdiv(num_columns, _TILE[1]), triton.cdiv(num_rows, _TILE[0])


@triton.jit
def magnitude(values):  # type: ignore[no-untyped-def]
    """Return integers that are ordered like the absolute values: their fp32 bits. Those of NaN are the largest."""
    return tl.abs(values.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def _largest_value(tensor, amax, num_elements, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    largest = tl.zeros([BLOCK], tl.int32)
    for block in tl.static_range(BLOCKS):
        places = start + block * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude(tl.load(tensor + places, mask=places < num_elements, other=0.0)))
    tl.atomic_max(amax, tl.max(largest))


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    matrix, amax, as_is, transposed, inverse_scale, num_rows, num_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)[:, None]
    columns = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)[None, :]
    # as fp8_format.quantization_scale
    largest = tl.maximum(tl.load(amax), _SMALLEST_AMAX, propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    exponent = _EXPONENT_SUM - (largest >> _MANTISSA_BITS) - ((largest & _MANTISSA) > _LARGEST_FRACTION).to(tl.int32)
    is_finite = largest < _INFINITY
    scale = tl.where(is_finite, (exponent << _MANTISSA_BITS).to(tl.float32, bitcast=True), float("nan"))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        inverse = ((254 - exponent) << _MANTISSA_BITS).to(tl.float32, bitcast=True)
        tl.store(inverse_scale, tl.where(is_finite, inverse, float("nan")))
    inside = (rows < num_rows) & (columns < num_columns)
    values = tl.load(matrix + rows * num_columns + columns, mask=inside, other=0.0).to(tl.float32) * scale
    values = tl.clamp(values, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    rounded = values.to(as_is.dtype.element_ty)
    if ROWS:
        tl.store(as_is + rows * num_columns + columns, rounded, mask=inside)
    if COLUMNS:
        tl.store(transposed + tl.trans(columns) * num_rows + tl.trans(rows), tl.trans(rounded), mask=tl.trans(inside))


@triton.jit
def _transpose(matrix, result, num_rows, num_columns, TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(1).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)[:, None]
    columns = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    values = tl.load(matrix + rows * num_columns + columns, mask=inside)
    tl.store(result + tl.trans(columns) * num_rows + tl.trans(rows), tl.trans(values), mask=tl.trans(inside))


# Kernels of norm.py. Symbols: M tokens, H hidden size. All tensors are contiguous, with M·H elements.


def norm_forward(
    left: Tensor, right: Tensor | None, weight: Tensor, eps: float, total: Tensor, normed: Tensor, amax: Tensor
) -> Tensor:
    """Write left + right to `total`, and the RMSNorm of `total` to `normed`. Without `right`, `total` is `left`.

    `amax` is an fp32 scalar that contains zero. The kernel replaces it by the largest absolute value of `normed`.
    Return the inverse root-mean-squares [M] in fp32.
    """
    width = weight.numel()
    num_rows = left.numel() // width
    inverse_rms = torch.empty(num_rows, dtype=torch.float32, device=left.device)
    _norm_forward[(num_rows,)](
        left, right, weight, total, normed, inverse_rms, amax.view(torch.int32), width, eps,
        HAS_SUM=right is not None, BLOCK=triton.next_power_of_2(width), num_warps=_num_warps(width),
    )  # fmt: skip
    return inverse_rms


def norm_backward(
    grad_normed: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    grad: Tensor,
    amax: Tensor,
) -> Tensor:
    """Write the gradient of `total` to `grad`, given those of `normed` and of `total` as a result of `norm_forward`.

    `amax` is an fp32 scalar that contains zero. The kernel replaces it by the largest absolute value of `grad`. Return
    the gradient of the weight, [H] in fp32.
    """
    width = weight.numel()
    num_rows = inverse_rms.numel()
    num_processors = torch.cuda.get_device_properties(total.device).multi_processor_count
    num_programs = min(num_rows, _PROGRAMS_PER_PROCESSOR * num_processors)
    grad_weights = torch.empty(num_programs, width, dtype=torch.float32, device=total.device)
    _norm_backward[(num_programs,)](
        grad_normed, grad_total, total, weight, inverse_rms, grad, grad_weights, amax.view(torch.int32),
        num_rows, width,
        HAS_SUM=grad_total is not None, BLOCK=triton.next_power_of_2(width), num_warps=_num_warps(width),
    )  # fmt: skip
    return grad_weights.sum(0)


def _num_warps(width: int) -> int:
    return min(max(triton.next_power_of_2(width) // 512, 1), 16)


@triton.jit
def _norm_forward(  # type: ignore[no-untyped-def]
    left, right, weight, total, normed, inverse_rms, amax, width, eps, HAS_SUM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    values = tl.load(left + places, mask=inside, other=0.0)
    if HAS_SUM:
        added = values.to(tl.float32) + tl.load(right + places, mask=inside, other=0.0).to(tl.float32)
        values = added.to(values.dtype)  # the backward pass reads the rounded sum
        tl.store(total + places, values, mask=inside)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(inverse_rms + row, scale)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = (values * scale * weights).to(normed.dtype.element_ty)
    tl.store(normed + places, result, mask=inside)
    tl.atomic_max(amax, tl.max(magnitude(result)))


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    grad_normed, grad_total, total, weight, inverse_rms, grad, grad_weights, amax, num_rows, width,
    HAS_SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.int32)
    for row in range(tl.program_id(0).to(tl.int64), num_rows, tl.num_programs(0)):
        places = row * width + columns
        scale = tl.load(inverse_rms + row)
        units = tl.load(total + places, mask=inside, other=0.0).to(tl.float32) * scale
        grads = tl.load(grad_normed + places, mask=inside, other=0.0).to(tl.float32)
        sums += grads * units
        grads *= weights
        result = scale * (grads - units * (tl.sum(grads * units) / width))
        if HAS_SUM:
            result += tl.load(grad_total + places, mask=inside, other=0.0).to(tl.float32)
        rounded = result.to(grad.dtype.element_ty)
        tl.store(grad + places, rounded, mask=inside)
        largest = tl.maximum(largest, magnitude(rounded))
    tl.store(grad_weights + tl.program_id(0) * width + columns, sums, mask=inside)
    tl.atomic_max(amax, tl.max(largest))


# Kernels of swiglu.py. All tensors are contiguous matrices [M, F], or halves [M, F] of one contiguous matrix [M, 2F].


def swiglu_forward(gate: Tensor, up: Tensor, output: Tensor, amax: Tensor | None) -> None:
    """Write silu(gate) · up to `output`, and its largest absolute value to the fp32 scalar `amax`, which is zero."""
    num_rows, width = output.shape
    _swiglu_forward[(num_rows,)](
        gate, up, output, _bits(amax), width, gate.stride(0), HAS_AMAX=amax is not None, BLOCK=_BLOCK
    )  # fmt: skip


def swiglu_backward(
    gate: Tensor, up: Tensor, grad: Tensor, gate_grad: Tensor, up_grad: Tensor, amaxes: Tensor | None
) -> None:
    """Write the gradients of `gate` and `up`, given that of the output.

    `amaxes` contains zeros in fp32, for the largest absolute value of each gradient, or one zero for that of both.
    """
    num_rows, width = grad.shape
    bits = _bits(amaxes)
    gate_amax, up_amax = (None, None) if bits is None else (bits[:1], bits[-1:])
    _swiglu_backward[(num_rows,)](
        gate, up, grad, gate_grad, up_grad, gate_amax, up_amax, width, gate.stride(0),
        HAS_AMAX=bits is not None, BLOCK=_BLOCK,
    )  # fmt: skip


def _bits(amax: Tensor | None) -> Tensor | None:
    return None if amax is None else amax.view(torch.int32)


@triton.jit
def _swiglu_forward(gate, up, output, amax, width, stride, HAS_AMAX: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # one program per row, because the updates of amax are sequential
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        gates = tl.load(gate + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        ups = tl.load(up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        result = (gates * tl.sigmoid(gates) * ups).to(output.dtype.element_ty)
        tl.store(output + row * width + columns, result, mask=inside)
        if HAS_AMAX:
            largest = tl.maximum(largest, magnitude(result))
    if HAS_AMAX:
        tl.atomic_max(amax, tl.max(largest))


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    gate, up, grad, gate_grad, up_grad, gate_amax, up_amax, width, stride,
    HAS_AMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest_gate = tl.zeros([BLOCK], tl.int32)
    largest_up = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        places = row * stride + columns
        gates = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
        ups = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
        grads = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gates)
        silu = gates * share
        slope = share + silu * (1 - share)  # of silu
        for_gate = (grads * ups * slope).to(gate_grad.dtype.element_ty)
        for_up = (grads * silu).to(up_grad.dtype.element_ty)
        tl.store(gate_grad + places, for_gate, mask=inside)
        tl.store(up_grad + places, for_up, mask=inside)
        if HAS_AMAX:
            largest_gate = tl.maximum(largest_gate, magnitude(for_gate))
            largest_up = tl.maximum(largest_up, magnitude(for_up))
    if HAS_AMAX:
        tl.atomic_max(gate_amax, tl.max(largest_gate))
        tl.atomic_max(up_amax, tl.max(largest_up))
