"""Interface of weight sources (random initialization or files), read in blocks of Hugging Face tensors."""

from typing import Protocol

import torch
from torch import Tensor

from megabench.models.mapping import Piece, Shapes, Shard, whole_piece


class Weights(Protocol):
    """A source of a model's weights. Each process reads only the blocks that it needs."""

    def read(self, wanted: Piece) -> Tensor:
        """Return a block of a Hugging Face tensor, in a dtype without loss of precision: [rows, columns] or [rows].

        Randomly initialized weights are on the device for which they are generated. All other weights are on CPU.
        """
        ...


def read_shard(weights: Weights, cut: Shard) -> Tensor:
    """Read a tensor-parallel shard onto the device of the blocks of `weights`. Padding rows are zero."""
    # Read each tensor only once, because the pieces of adjacent query groups are contiguous.
    spans = {span.name: (span.rows[0], weights.read(span)) for span in cut.spans()}
    blocks = []
    for piece in cut.pieces:
        first, block = spans[piece.name]
        blocks.append(block[piece.rows[0] - first : piece.rows[1] - first])
    if cut.padding_rows:
        blocks.append(blocks[0].new_zeros(cut.padding_rows, *blocks[0].shape[1:]))
    return torch.cat(blocks) if len(blocks) > 1 else blocks[0]


def read_flat(weights: Weights, name: str, shapes: Shapes, start: int, stop: int) -> Tensor:
    """Read elements `start` to `stop` of a Hugging Face tensor that is flattened row by row: [stop−start].

    Elements past the end of the tensor are zero. The result is on the device of the blocks of `weights`, or on CPU if
    all elements are past the end.
    """
    whole = whole_piece(name, shapes[name])
    width = whole.columns[1] if whole.columns else 1
    end = min(stop, whole.num_rows * width)
    if start >= end:
        return torch.zeros(stop - start)
    rows = start // width, -(-end // width)
    block = weights.read(Piece(name, rows, whole.columns)).flatten()
    values = block[start - rows[0] * width : end - rows[0] * width]
    return torch.cat([values, values.new_zeros(stop - end)]) if stop > end else values
