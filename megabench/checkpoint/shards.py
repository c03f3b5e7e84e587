"""What a rank holds of the state, in terms of whole tensors: rectangles of Hugging Face tensors.

A rank's shard of a parallel parameter is a stack of pieces; a data-parallel rank holds a range of that shard's
elements, row by row. Such a range is a few rectangles of Hugging Face tensors, which know nothing of layouts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megabench.models.mapping import Piece, Shard

StateKind = Literal["weight", "exp_avg", "exp_avg_sq", "row_var", "col_var", "variance"]

_KEY = re.compile(r"(?P<kind>\w+):(?P<name>[^\[]+)\[(?P<r0>\d+):(?P<r1>\d+)(?:,(?P<c0>\d+):(?P<c1>\d+))?\]")


@dataclass(frozen=True)
class Block:
    """A rectangle, and where its elements begin in the range that it belongs to."""

    piece: Piece
    start: int


@dataclass(frozen=True)
class StateShard:
    """A part of one kind of state on this rank: `values`, flat and alive, hold `blocks` one after the other.

    Another rank may hold the same (a replica); the owner alone saves it, and every holder loads it.
    """

    kind: StateKind
    blocks: tuple[Block, ...]
    values: Tensor
    is_owner: bool = True


@dataclass(frozen=True)
class TrainingState:
    """This rank's shards, and what all ranks share: how often the optimizer stepped, and fp16's loss scale."""

    shards: list[StateShard]
    optimizer_step: int
    loss_scale: dict[str, float] | None = None


def whole(name: str, shape: tuple[int, ...]) -> Shard:
    """The shard that is all of a Hugging Face tensor."""
    return Shard((Piece(name, (0, shape[0]), (0, shape[1]) if len(shape) == 2 else None),))


def size(piece: Piece) -> tuple[int, ...]:
    """[rows, columns] or [rows]."""
    rows = piece.rows[1] - piece.rows[0]
    return (rows,) if piece.columns is None else (rows, piece.columns[1] - piece.columns[0])


def num_elements(piece: Piece) -> int:
    rows, *columns = size(piece)
    return rows * (columns[0] if columns else 1)


def blocks_of(cut: Shard, start: int, stop: int) -> tuple[Block, ...]:
    """The rectangles that the elements [start, stop) of a shard make up; what is padding is left out."""
    blocks: list[Block] = []
    first = 0
    for piece in cut.pieces:
        last = first + num_elements(piece)
        low, high = max(start, first), min(stop, last)
        if low < high:
            blocks += (Block(part, first + at - start) for part, at in _rectangles(piece, low - first, high - first))
        first = last
    return tuple(blocks)


def _rectangles(piece: Piece, low: int, high: int) -> Iterator[tuple[Piece, int]]:
    """Elements [low, high) of a piece as rectangles, each with its first element: a broken row, rows, a broken row."""
    if piece.columns is None:
        yield Piece(piece.name, (piece.rows[0] + low, piece.rows[0] + high)), low
        return
    left, right = piece.columns
    width = right - left
    while low < high:
        row, column = divmod(low, width)
        if column == 0 and high - low >= width:
            rows, columns = (high - low) // width, (left, right)
            taken = rows * width
        else:
            taken = min(width - column, high - low)
            rows, columns = 1, (left + column, left + column + taken)
        top = piece.rows[0] + row
        yield Piece(piece.name, (top, top + rows), columns), low
        low += taken


def view(values: Tensor, block: Block) -> Tensor:
    """The elements of a block, as [rows, columns] or [rows]; a view of the flat `values`."""
    return values[block.start : block.start + num_elements(block.piece)].view(size(block.piece))


def key(kind: str, piece: Piece) -> str:
    """The name of a rectangle in a file: "exp_avg:model.norm.weight[0:64]", "weight:lm_head.weight[0:8,0:64]"."""
    span = f"{piece.rows[0]}:{piece.rows[1]}"
    if piece.columns is not None:
        span += f",{piece.columns[0]}:{piece.columns[1]}"
    return f"{kind}:{piece.name}[{span}]"


def parse_key(text: str) -> tuple[str, Piece]:
    """The kind and the rectangle that `key` named."""
    found = _KEY.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} names no rectangle of a tensor")
    columns = (int(found["c0"]), int(found["c1"])) if found["c0"] else None
    return found["kind"], Piece(found["name"], (int(found["r0"]), int(found["r1"])), columns)


def overlap(one: Piece, other: Piece) -> Piece | None:
    """The rectangle that two rectangles of one tensor share."""
    rows = max(one.rows[0], other.rows[0]), min(one.rows[1], other.rows[1])
    if rows[0] >= rows[1]:
        return None
    if one.columns is None or other.columns is None:
        return Piece(one.name, rows)
    columns = max(one.columns[0], other.columns[0]), min(one.columns[1], other.columns[1])
    return Piece(one.name, rows, columns) if columns[0] < columns[1] else None


def within(inner: Piece, outer: Piece) -> tuple[slice, ...]:
    """The slices that cut `inner` out of a tensor that holds `outer`."""
    rows = slice(inner.rows[0] - outer.rows[0], inner.rows[1] - outer.rows[0])
    if inner.columns is None or outer.columns is None:
        return (rows,)
    return rows, slice(inner.columns[0] - outer.columns[0], inner.columns[1] - outer.columns[0])
