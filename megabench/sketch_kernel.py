"""The sums of `sketch.sketch` on a GPU, in one pass over the elements."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # number of elements that a program reads at a time
_TILES = 128  # number of tiles that each program adds up, in fp32
_SIZES = ("row_stride", "num_rows", "num_columns", "top", "left", "whole_rows", "whole_columns", "num_splits")


def sums_of_cells(part: Tensor, shape: tuple[int, int], start: tuple[int, int], seed: int, num_blocks: int) -> Tensor:
    """Return the squared norm and 64 projections of each cell of a part: fp64 [num_blocks, num_blocks, 65].

    A cell has the elements of one block of rows and one block of columns of the whole tensor. `shape` is that of the
    whole tensor, and `start` is the index of the part's first element. `seed` is a signed 64-bit integer.
    """
    part = part if part.stride(1) == 1 else part.contiguous()
    most = triton.cdiv(shape[0], num_blocks) * triton.cdiv(shape[1], num_blocks)  # elements of a cell
    num_splits = triton.cdiv(min(most, part.numel()), _TILE * _TILES)
    found = torch.empty(num_blocks, num_blocks, num_splits, 65, dtype=torch.float64, device=part.device)
    grid = (num_blocks * num_blocks, num_splits)
    with torch.cuda.device(part.device):
        _sum_cells[grid](part, part.stride(0), *part.shape, *start, *shape, seed, found, num_splits, num_blocks, _TILE)
    return found.sum(2)


@triton.jit(do_not_specialize=[*_SIZES, "seed"])
def _sum_cells(  # type: ignore[no-untyped-def]
    part, row_stride, num_rows, num_columns, top, left, whole_rows, whole_columns, seed, found, num_splits,
    NUM_BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    cell, split = tl.program_id(0), tl.program_id(1)
    # the part's rows r for which r * NUM_BLOCKS // whole_rows == cell // NUM_BLOCKS, and its columns c for which
    # c * NUM_BLOCKS // whole_columns == cell % NUM_BLOCKS
    first_row, last_row = _range(cell // NUM_BLOCKS, whole_rows, top, num_rows, NUM_BLOCKS)
    first_column, last_column = _range(cell % NUM_BLOCKS, whole_columns, left, num_columns, NUM_BLOCKS)
    width = tl.maximum(last_column - first_column, 0).to(tl.int32)
    size = (tl.maximum(last_row - first_row, 0) * width).to(tl.int32)
    bits = tl.arange(0, 32)
    squares = tl.zeros([TILE], tl.float32)
    low_sums = tl.zeros([TILE, 32], tl.float32)
    high_sums = tl.zeros([TILE, 32], tl.float32)
    for begin in range(split * TILE, size, num_splits * TILE):
        at = begin + tl.arange(0, TILE)
        row = first_row + at // width
        column = first_column + at % width
        values = tl.load(part + (row - top) * row_stride + (column - left), mask=at < size, other=0.0).to(tl.float32)
        hashed = _splitmix64(row * whole_columns + column, seed)
        squares += values * values
        low_sums += _signed(values, hashed.to(tl.uint32), bits)
        high_sums += _signed(values, (hashed >> 32).to(tl.uint32), bits)
    own = found + (cell * num_splits + split).to(tl.int64) * 65
    tl.store(own, tl.sum(squares.to(tl.float64), 0))
    tl.store(own + 1 + bits, tl.sum(low_sums.to(tl.float64), 0))
    tl.store(own + 33 + bits, tl.sum(high_sums.to(tl.float64), 0))


@triton.jit
def _range(block, whole, start, size, NUM_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.cdiv(block.to(tl.int64) * whole, NUM_BLOCKS)
    last = tl.cdiv((block + 1).to(tl.int64) * whole, NUM_BLOCKS)
    return tl.maximum(first, start), tl.minimum(last, start + size)


@triton.jit
def _splitmix64(index, seed):  # type: ignore[no-untyped-def]
    mixed = index.to(tl.uint64) * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def _signed(values, hashed, bits):  # type: ignore[no-untyped-def]
    """Return each value with 32 signs, [TILE, 32]. A bit of `hashed` that is 1 negates the value."""
    turned = ((hashed[:, None] >> bits[None, :]) & 1) << 31
    return (values.to(tl.uint32, bitcast=True)[:, None] ^ turned).to(tl.float32, bitcast=True)
