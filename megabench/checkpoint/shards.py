"""Mapping from the state shards of a rank to rectangular blocks of Hugging Face tensors.

A tensor-parallel shard of a parameter is a stack of pieces of Hugging Face tensors. A data-parallel rank owns a range
of the elements of that shard in row-major order. A range of elements consists of a few rectangular blocks of Hugging
Face tensors. The blocks do not depend on the layout of the run that loads the checkpoint.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from megabench.models.mapping import Piece, Shard, whole_piece
from megabench.optim.optimizers import StateKind

_KEY = re.compile(r"(?P<kind>\w+):(?P<name>[^\[]+)\[(?P<r0>\d+):(?P<r1>\d+)(?:,(?P<c0>\d+):(?P<c1>\d+))?\]")


@dataclass(frozen=True)
class Block:
    """A rectangular block, and the offset of its first element in the flat range of a shard."""

    piece: Piece
    start: int


@dataclass(frozen=True)
class StateShard:
    """A shard of one kind of state on this rank, for example of the weights.

    `values` is the flat tensor that training uses; it contains the elements of `blocks` one after another. Other ranks
    may have replicas of a shard. Only the owner saves the shard, and all ranks with a replica load the shard.
    """

    kind: StateKind
    blocks: tuple[Block, ...]
    values: Tensor
    is_owner: bool = True


@dataclass(frozen=True)
class TrainingState:
    """The shards of this rank, the number of optimizer steps, and the loss scale state of fp16 training."""

    shards: list[StateShard]
    optimizer_step: int
    loss_scale: dict[str, float] | None = None


def whole(name: str, shape: tuple[int, ...]) -> Shard:
    """Return the shard that contains a whole Hugging Face tensor."""
    return Shard((whole_piece(name, shape),))


def size(piece: Piece) -> tuple[int, ...]:
    """Return the shape of a piece: (rows, columns) for a matrix, (rows,) for a vector."""
    rows = piece.rows[1] - piece.rows[0]
    return (rows,) if piece.columns is None else (rows, piece.columns[1] - piece.columns[0])


def num_elements(piece: Piece) -> int:
    rows, *columns = size(piece)
    return rows * (columns[0] if columns else 1)


def blocks_of(cut: Shard, start: int, stop: int) -> tuple[Block, ...]:
    """Return the rectangular blocks that cover elements [start, stop) of a shard, without padding."""
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
    """Split elements [low, high) of a piece into rectangles, and yield each with the index of its first element.

    The rectangles are the end of a row, a group of whole rows, and the start of a row. Any rectangle may be absent.
    """
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
    """Return the elements of a block as a view of the flat `values`, of shape [rows, columns] or [rows]."""
    return values[block.start : block.start + num_elements(block.piece)].view(size(block.piece))


def key(kind: str, piece: Piece) -> str:
    """Return the name of a rectangular block in a tensor file.

    Examples: "exp_avg:model.norm.weight[0:64]" and "weight:lm_head.weight[0:8,0:64]".
    """
    span = f"{piece.rows[0]}:{piece.rows[1]}"
    if piece.columns is not None:
        span += f",{piece.columns[0]}:{piece.columns[1]}"
    return f"{kind}:{piece.name}[{span}]"


def parse_key(text: str) -> tuple[str, Piece]:
    """Parse a name that `key` returned into the kind and the rectangular block."""
    found = _KEY.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not the name of a tensor block")
    columns = (int(found["c0"]), int(found["c1"])) if found["c0"] else None
    return found["kind"], Piece(found["name"], (int(found["r0"]), int(found["r1"])), columns)


def overlap(one: Piece, other: Piece) -> Piece | None:
    """Return the intersection of two rectangular blocks of one tensor, or None if the intersection is empty."""
    rows = max(one.rows[0], other.rows[0]), min(one.rows[1], other.rows[1])
    if rows[0] >= rows[1]:
        return None
    if one.columns is None or other.columns is None:
        return Piece(one.name, rows)
    columns = max(one.columns[0], other.columns[0]), min(one.columns[1], other.columns[1])
    return Piece(one.name, rows, columns) if columns[0] < columns[1] else None


def first_overlap(pieces: Iterable[Piece]) -> Piece | None:
    """Return the intersection of two of the blocks of one tensor, or None if all blocks are disjoint."""
    active: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.rows):
        active = [other for other in active if other.rows[1] > piece.rows[0]]
        if twice := next(filter(None, (overlap(piece, other) for other in active)), None):
            return twice
        active.append(piece)
    return None


def within(inner: Piece, outer: Piece) -> tuple[slice, ...]:
    """Return the slices that select the block `inner` from a tensor with the elements of the block `outer`."""
    rows = slice(inner.rows[0] - outer.rows[0], inner.rows[1] - outer.rows[0])
    if inner.columns is None or outer.columns is None:
        return (rows,)
    return rows, slice(inner.columns[0] - outer.columns[0], inner.columns[1] - outer.columns[0])
