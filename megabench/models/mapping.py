"""Weight mapping between Hugging Face tensors and tensor-parallel shards, derived from the tables of families.py.

A shard of a parallel parameter is a list of pieces, concatenated along dim 0. Each piece is a block of rows and columns
of one Hugging Face tensor. Initial weights, import, export and checkpoints all use the mapping. The mapping needs only
sizes, no process groups and no torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megabench.models.families import Cut, Rule
from megabench.models.shape import ModelShape

Shapes = dict[str, tuple[int, ...]]

_LAYERS = "decoder.layers."


@dataclass(frozen=True)
class Piece:
    """Rows and columns [start, stop) of the matrix form of the Hugging Face tensor `name`; see `matrix_form`.

    `columns` is None for a vector.
    """

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class Shard:
    """One tensor-parallel rank's part of a parallel parameter: the `pieces`, then `padding_rows` rows of zeros."""

    pieces: tuple[Piece, ...]
    padding_rows: int = 0

    def spans(self) -> tuple[Piece, ...]:
        """Merge the pieces of each Hugging Face tensor into one block. The pieces of a tensor are contiguous."""
        by_name: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.name, []).append(piece)
        return tuple(
            Piece(name, (min(p.rows[0] for p in pieces), max(p.rows[1] for p in pieces)), pieces[0].columns)
            for name, pieces in by_name.items()
        )


def matrix_form(size: tuple[int, ...]) -> tuple[int] | tuple[int, int]:
    """Return the shape in which pieces address a tensor of any number of dimensions: [rows, columns] or [rows].

    A scalar is a vector of one element. From the second dimension on, the dimensions of a tensor form its columns, so
    that the order of the elements stays the same.
    """
    if len(size) < 2:
        return (math.prod(size),)
    return size[0], math.prod(size[1:])


def whole_piece(name: str, size: tuple[int, ...]) -> Piece:
    """Return the piece that covers a Hugging Face tensor of shape `size`."""
    return Piece(name, (0, matrix_form(size)[0]), _columns(size))


def padded_vocab_size(shape: ModelShape, tp: int) -> int:
    """Return the vocabulary size, rounded up to a multiple of `tp`."""
    return -(-shape.vocab_size // tp) * tp


def hugging_face_shapes(shape: ModelShape) -> Shapes:
    """Return the shape of every Hugging Face parameter by name, in model order. Tied parameters appear once."""
    table = shape.table
    shapes = _shapes(table.first, shape)
    for layer in range(shape.num_layers):
        shapes |= _shapes(table.layer, shape, f"{table.layer_prefix}{layer}.")
    return shapes | _shapes(shape.last, shape)


def hidden_matrices(shape: ModelShape) -> frozenset[str]:
    """Return the names of the matrices of the layers, without embeddings and the output layer."""
    ends = _shapes(shape.table.first, shape) | _shapes(shape.last, shape)
    return frozenset(name for name, size in hugging_face_shapes(shape).items() if len(size) == 2 and name not in ends)


def stored_shapes(shape: ModelShape) -> Shapes:
    """Return the shapes of all parameters and persistent buffers, which files of the model contain."""
    return hugging_face_shapes(shape) | (shape.foreign.buffers if shape.foreign else {})


def largest_parameter(shape: ModelShape) -> int:
    """Return the number of elements of the model's largest parameter."""
    return max(math.prod(dims) for dims in hugging_face_shapes(shape).values())


def _shapes(rules: tuple[Rule, ...], shape: ModelShape, prefix: str = "") -> Shapes:
    return {prefix + name: shape.dims(dims) for rule in rules for name, dims in rule.tensors.items()}


def shard(parameter: str, shape: ModelShape, tp: int, rank: int) -> Shard:
    """Return the shard of a parallel parameter on tensor-parallel rank `rank` of `tp`.

    `parameter` contains the layer's number in the whole model, as in "decoder.layers.7.mlp.linear_fc1.weight".
    """
    table, prefix, name = shape.table, "", parameter
    rules = table.first + shape.last
    if parameter.startswith(_LAYERS):
        layer, _, name = parameter.removeprefix(_LAYERS).partition(".")
        rules, prefix = table.layer, f"{table.layer_prefix}{int(layer)}."
    rule = next(rule for rule in rules if rule.parameter == name)
    return _CUTS[rule.cut](_shapes((rule,), shape, prefix), shape, tp, rank)


def parallel_parameters(shape: ModelShape, layers: range, has_embedding: bool, has_output: bool) -> list[str]:
    """Return the names of the parameters of a chunk of tensor-parallel blocks with these layers, in model order."""
    first = [rule.parameter for rule in shape.table.first] if has_embedding else []
    middle = [f"{_LAYERS}{layer}.{rule.parameter}" for layer in layers for rule in shape.table.layer]
    last = [rule.parameter for rule in shape.last] if has_output else []
    return [name for name in first + middle + last if name]


def _part(size: int, tp: int, rank: int) -> tuple[int, int]:
    return size * rank // tp, size * (rank + 1) // tp


def _columns(size: tuple[int, ...]) -> tuple[int, int] | None:
    _, *columns = matrix_form(size)
    return (0, columns[0]) if columns else None


def _whole(tensors: Shapes, shape: ModelShape, tp: int, rank: int) -> Shard:
    return Shard(tuple(whole_piece(name, size) for name, size in tensors.items()))


def _rows(tensors: Shapes, shape: ModelShape, tp: int, rank: int) -> Shard:
    return Shard(tuple(Piece(name, _part(size[0], tp, rank), _columns(size)) for name, size in tensors.items()))


def _cut_columns(tensors: Shapes, shape: ModelShape, tp: int, rank: int) -> Shard:
    return Shard(tuple(Piece(name, (0, size[0]), _part(size[1], tp, rank)) for name, size in tensors.items()))


def _vocabulary(tensors: Shapes, shape: ModelShape, tp: int, rank: int) -> Shard:
    start, stop = _part(padded_vocab_size(shape, tp), tp, rank)
    real = min(start, shape.vocab_size), min(stop, shape.vocab_size)
    padding = (stop - start) - (real[1] - real[0])
    return Shard(tuple(Piece(name, real, _columns(size)) for name, size in tensors.items()), padding)


def _groups(tensors: Shapes, shape: ModelShape, tp: int, rank: int) -> Shard:
    pieces = []
    for group in range(*_part(shape.num_kv_heads, tp, rank)):
        for name, size in tensors.items():
            height = size[0] // shape.num_kv_heads
            pieces.append(Piece(name, (group * height, (group + 1) * height), _columns(size)))
    return Shard(tuple(pieces))


_CUTS: dict[Cut, Callable[[Shapes, ModelShape, int, int], Shard]] = {
    "whole": _whole,
    "rows": _rows,
    "columns": _cut_columns,
    "vocabulary": _vocabulary,
    "groups": _groups,
}
