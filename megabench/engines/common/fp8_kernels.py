"""The Triton kernels of fp8.py. Each kernel reads its input once, at the speed of the GPU's memory.

Sizes: Symbols: M rows, N columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabench.engines.common import fp8_format
from megabench.engines.common.fp8_format import DTYPE

_BLOCK, _BLOCKS = 1024, 8  # elements per block and blocks per program
_TILE = (64, 256)  # rows and columns of a matrix per program

# kernels can read global variables only as constants
_MANTISSA_BITS, _MANTISSA = tl.constexpr(fp8_format.MANTISSA_BITS), tl.constexpr(fp8_format.MANTISSA)
_EXPONENT_SUM, _INFINITY = tl.constexpr(fp8_format.EXPONENT_SUM), tl.constexpr(fp8_format.INFINITY)
_LARGEST_FRACTION = tl.constexpr(fp8_format.LARGEST_FRACTION)
_LARGEST, _SMALLEST_AMAX = tl.constexpr(fp8_format.LARGEST), tl.constexpr(fp8_format.SMALLEST_AMAX)


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
