"""Initial weights: the same values however the model is cut."""

import pytest
import torch

from megabench.engines.common.initial_weights import TILE, RandomWeights, initial_piece, standard_deviation
from megabench.models.catalog import get_model
from megabench.models.mapping import (
    Piece,
    hugging_face_shapes,
    padded_vocab_size,
    parallel_parameters,
    shard,
)
from megabench.models.weights import read_shard

SHAPE = get_model("llama-tiny")


def test_a_block_does_not_depend_on_its_cut() -> None:
    size = (2 * TILE + 100, TILE + 30)
    whole = initial_piece(Piece("w", (0, size[0]), (0, size[1])), size, 1.0, seed=7)
    assert abs(whole.mean()) < 0.01
    assert abs(whole.std() - 1) < 0.01
    for rows, columns in [((0, 10), (0, 5)), ((TILE - 3, 2 * TILE + 50), (TILE - 1, TILE + 30)), ((5, 5), (0, 7))]:
        block = initial_piece(Piece("w", rows, columns), size, 1.0, seed=7)
        assert torch.equal(block, whole[slice(*rows), slice(*columns)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_holds_the_same_values() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    for rows, columns in [((0, 2 * TILE + 100), (0, TILE + 30)), ((TILE - 3, 2 * TILE + 50), (TILE - 1, TILE + 9))]:
        piece, size = Piece("w", rows, columns), (2 * TILE + 100, TILE + 30)
        block = initial_piece(piece, size, 1.0, seed=7, device=last)
        assert block.device == last
        assert torch.equal(block.cpu(), initial_piece(piece, size, 1.0, seed=7))


def test_seed_name_and_tile_all_matter() -> None:
    def draw(name: str, seed: int) -> torch.Tensor:
        return initial_piece(Piece(name, (0, 2 * TILE), (0, 8)), (2 * TILE, 8), 1.0, seed)

    assert not torch.equal(draw("a", 1), draw("b", 1))
    assert not torch.equal(draw("a", 1), draw("a", 2))
    assert not torch.equal(draw("a", 1)[:TILE], draw("a", 1)[TILE:])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [512, 509])
def test_shards_hold_every_weight_once(tp: int, vocab_size: int) -> None:
    from dataclasses import replace

    shape = replace(SHAPE, vocab_size=vocab_size)
    shapes = hugging_face_shapes(shape)
    counts = {name: torch.zeros(size) for name, size in shapes.items()}
    for name in parallel_parameters(shape, range(shape.num_layers), has_embedding=True, has_output=True):
        for rank in range(tp):
            for piece in shard(name, shape, tp, rank).pieces:
                target = counts[piece.name][slice(*piece.rows)]
                (target if piece.columns is None else target[:, slice(*piece.columns)]).add_(1)
    for name, count in counts.items():
        copies = tp if count.ndim == 1 else 1  # norm weights are on every rank
        assert torch.equal(count, torch.full_like(count, copies)), name


def test_vocabulary_padding_is_zero() -> None:
    from dataclasses import replace

    shape = replace(SHAPE, vocab_size=509)
    assert padded_vocab_size(shape, 4) == 512
    last = read_shard(RandomWeights(shape, seed=1), shard("output_layer.weight", shape, 4, 3))
    assert last.shape == (128, shape.hidden_size)
    assert last[:125].abs().min(dim=1).values.sum() > 0
    assert not last[125:].any()


def test_residual_matrices_start_smaller() -> None:
    assert standard_deviation("model.layers.0.mlp.down_proj.weight", SHAPE) == pytest.approx(0.02 / 4)
    assert standard_deviation("model.layers.0.mlp.up_proj.weight", SHAPE) == 0.02
