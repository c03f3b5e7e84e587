"""Where weights come from: drawn, or read from files, always by blocks of Hugging Face tensors."""

from typing import Protocol

import torch
from torch import Tensor

from megabench.models.mapping import Piece, Shapes, Shard


class Weights(Protocol):
    """The weights of a model, of which each process reads what it needs."""

    def read(self, wanted: Piece) -> Tensor:
        """A block of a Hugging Face tensor, in a dtype that loses nothing: [rows, columns] or [rows].

        On CPU, or, of drawn weights, on the device that they are drawn for.
        """
        ...


def read_shard(weights: Weights, cut: Shard) -> Tensor:
    """A tensor-parallel shard where `weights` puts its blocks, padding rows zero."""
    # each tensor once: the pieces of its query groups are neighbours
    spans = {span.name: (span.rows[0], weights.read(span)) for span in cut.spans()}
    blocks = []
    for piece in cut.pieces:
        first, block = spans[piece.name]
        blocks.append(block[piece.rows[0] - first : piece.rows[1] - first])
    if cut.padding_rows:
        blocks.append(blocks[0].new_zeros(cut.padding_rows, *blocks[0].shape[1:]))
    return torch.cat(blocks) if len(blocks) > 1 else blocks[0]


def read_flat(weights: Weights, name: str, shapes: Shapes, start: int, stop: int) -> Tensor:
    """Elements `start` to `stop` of a Hugging Face tensor, counted through its rows: [stop−start].

    Elements beyond the tensor's end are zero. Where the weights' blocks are, or on CPU where all lie beyond the end.
    """
    shape = shapes[name]
    width = shape[1] if len(shape) == 2 else 1
    end = min(stop, shape[0] * width)
    if start >= end:
        return torch.zeros(stop - start)
    rows = start // width, -(-end // width)
    block = weights.read(Piece(name, rows, (0, width) if len(shape) == 2 else None)).flatten()
    values = block[start - rows[0] * width : end - rows[0] * width]
    return torch.cat([values, values.new_zeros(stop - end)]) if stop > end else values
