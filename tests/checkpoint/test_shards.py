"""Ranges of shards as rectangles of whole tensors: every element once, where it belongs."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megabench.checkpoint.shards import blocks_of, key, num_elements, overlap, parse_key, view, whole, within
from megabench.models.catalog import get_model
from megabench.models.mapping import Piece, hugging_face_shapes, parallel_parameters, shard

SHAPE = get_model("llama-tiny").with_layers(1)
SIZES = hugging_face_shapes(SHAPE)
PARAMETERS = parallel_parameters(SHAPE, range(1), has_embedding=True, has_output=True)


def numbered() -> dict[str, Tensor]:
    """Every Hugging Face tensor with other numbers in every element."""
    tensors, start = {}, 0
    for name, size in SIZES.items():
        count = torch.Size(size).numel()
        tensors[name] = torch.arange(start, start + count).view(size)
        start += count
    return tensors


def flat_shard(cut, tensors: dict[str, Tensor]) -> Tensor:
    """A tensor-parallel shard, row by row; padding is -1."""
    rows = [tensors[p.name][slice(*p.rows)][..., slice(*(p.columns or (None, None)))].flatten() for p in cut.pieces]
    padding = cut.padding_rows * (cut.pieces[0].columns or (0, 1))[1]
    return torch.cat([*rows, torch.full((padding,), -1)])


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(PARAMETERS), tp=st.sampled_from([1, 2, 4]), cuts=st.lists(st.floats(0, 1), max_size=3))
def test_blocks_hold_every_element_where_it_belongs(name: str, tp: int, cuts: list[float]) -> None:
    tensors = numbered()
    seen = {tensor: torch.zeros(size, dtype=torch.int) for tensor, size in SIZES.items()}
    for rank in range(tp):
        cut = shard(name, SHAPE, tp, rank)
        values = flat_shard(cut, tensors)
        borders = sorted([0, *(int(part * len(values)) for part in cuts), len(values)])
        for start, stop in pairwise(borders):
            for block in blocks_of(cut, start, stop):
                found = view(values[start:stop], block)
                rectangle = within(block.piece, whole(block.piece.name, SIZES[block.piece.name]).pieces[0])
                assert torch.equal(found, tensors[block.piece.name][rectangle])
                seen[block.piece.name][rectangle] += 1
    times = 1 if shard(name, SHAPE, tp, 0) != shard(name, SHAPE, tp, tp - 1) else tp
    for piece in shard(name, SHAPE, tp, 0).pieces:
        assert (seen[piece.name] == times).all()


def test_padding_is_in_no_block() -> None:
    (piece,) = whole("model.norm.weight", (10,)).pieces
    assert blocks_of(whole("model.norm.weight", (10,)), 8, 16)[0].piece == Piece(piece.name, (8, 10))
    assert blocks_of(whole("model.norm.weight", (10,)), 10, 16) == ()


@pytest.mark.parametrize("piece", [Piece("model.norm.weight", (3, 64)), Piece("a.0.weight", (0, 8), (2, 5))])
def test_names_in_files_come_back(piece: Piece) -> None:
    assert parse_key(key("exp_avg", piece)) == ("exp_avg", piece)


def test_overlap() -> None:
    one, other = Piece("w", (0, 4), (0, 8)), Piece("w", (2, 6), (6, 10))
    assert overlap(one, other) == Piece("w", (2, 4), (6, 8))
    assert overlap(one, Piece("w", (4, 6), (0, 8))) is None
    assert overlap(one, Piece("w", (0, 4), (8, 9))) is None
    assert num_elements(one) == 32
