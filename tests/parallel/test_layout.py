"""Layouts: what fits, what is refused and with which advice, and which layers each chunk holds."""

import math
from collections.abc import Sequence
from itertools import product

import pytest

from megabench.config import RunConfig
from megabench.models.catalog import get_model
from megabench.parallel.layout import Layout, LayoutError, rank_groups
from megabench.specs.megatron import chunk_layers

TINY = get_model("llama-tiny")
LLAMA = get_model("llama3-8b")


def test_world_size_fills_dp() -> None:
    assert Layout(tp=8, pp=2).with_world_size(32) == Layout(tp=8, pp=2, dp=2)


@pytest.mark.parametrize(
    ("layout", "world_size", "words"),
    [
        (Layout(tp=4, pp=2), 12, ["tp=4", "pp=2", "12", "tp in {1, 2, 3}"]),
        (Layout(tp=3), 4, ["tp=3", "world size is 4", "tp in {1, 2}"]),
        (Layout(tp=2, pp=8), 4, ["multiple of 16", "lower cp and pp"]),
    ],
)
def test_world_size_that_does_not_fit(layout: Layout, world_size: int, words: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        layout.with_world_size(world_size)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("layout", "seq_length", "sentence"),
    [
        (Layout(tp=6), 8192, "tp=6 does not divide num_kv_heads=8 of llama3-8b; use tp in {1, 2, 4, 8}"),
        (Layout(tp=16), 8192, "tp=16 does not divide num_kv_heads=8 of llama3-8b; use tp in {1, 2, 4, 8}"),
        (Layout(pp=8, vp=8), 8192, "llama3-8b has 32 layers, fewer than pp·vp = 8·8 = 64 model chunks"),
        (Layout(vp=2), 8192, "vp=2 interleaves pipeline stages and needs pp > 1"),
        (Layout(tp=4), 8190, "seq_length=8190 is not divisible by tp·cp = 4·1; use a multiple of 4, e.g. 8192"),
        (Layout(cp=3), 8192, "seq_length=8192 is not divisible by 2·cp = 6; use a multiple of 6, e.g. 8196"),
        (Layout(tp=8, cp=2), 8196, "use a multiple of 16, e.g. 8208"),
    ],
)
def test_model_that_does_not_fit(layout: Layout, seq_length: int, sentence: str) -> None:
    with pytest.raises(LayoutError) as error:
        layout.check_model(LLAMA, seq_length)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("layout", "global_batch", "micro_batch", "words"),
    [
        (Layout(dp=4), 10, 2, ["global_batch=10", "2·4 = 8", "--global-batch 8"]),
        (Layout(pp=4, vp=2, dp=1), 6, 1, ["6 micro-batches", "pp=4", "--global-batch 4"]),
    ],
)
def test_batch_that_does_not_fit(layout: Layout, global_batch: int, micro_batch: int, words: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        layout.check_batch(global_batch, micro_batch)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("vp", [1, 2])
@pytest.mark.parametrize("num_layers", [5, 8, 13, 32])
def test_every_layer_is_in_one_chunk(pp: int, vp: int, num_layers: int) -> None:
    if num_layers < pp * vp:
        return
    stages = Layout(pp=pp, vp=vp).chunk_layers(num_layers)
    in_model_order = [stages[stage][chunk] for chunk in range(vp) for stage in range(pp)]
    assert [layer for layers in in_model_order for layer in layers] == list(range(num_layers))
    sizes = [len(layers) for layers in in_model_order]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the last chunk, with the output layer, is never the largest"


@pytest.mark.parametrize(("pp", "vp"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("num_layers", [4, 7, 9])
@pytest.mark.parametrize("output_cost", [0.4, 2.1, 3.5])
def test_no_other_split_is_faster(pp: int, vp: int, num_layers: int, output_cost: float) -> None:
    stages = Layout(pp=pp, vp=vp).chunk_layers(num_layers, output_cost)
    sizes = [len(stages[stage][chunk]) for chunk in range(vp) for stage in range(pp)]
    assert sum(sizes) == num_layers and min(sizes) >= 1

    def waiting(sizes: Sequence[int]) -> float:
        costs = [*sizes[:-1], sizes[-1] + output_cost]
        return sum(max(costs[chunk * pp : (chunk + 1) * pp]) for chunk in range(vp))

    others = (split for split in product(range(1, num_layers + 1), repeat=pp * vp) if sum(split) == num_layers)
    # with several rounds they are to be of one size as well, which may cost a part of a layer
    assert waiting(sizes) < min(waiting(split) for split in others) + (1.0 if vp > 1 else 1e-9)
    assert max(sizes) - min(sizes) <= math.ceil(output_cost) + 1


def test_the_ends_of_a_model_may_be_chunks_of_their_own() -> None:
    """405B has 126 layers: 128 chunks have one layer each, except the embedding and the output layer."""
    stages = Layout(pp=16, vp=8).chunk_layers(126, output_cost=0.7)
    sizes = [len(stages[stage][chunk]) for chunk in range(8) for stage in range(16)]
    assert sizes == [0] + [1] * 126 + [0]
    assert stages[15][7] == range(126, 126) and stages[1][0] == range(1)
    one_more = Layout(pp=127, vp=1).chunk_layers(126)
    assert [len(layers) for (layers,) in one_more] == [1] * 126 + [0]


def test_no_more_than_the_ends_are_without_layers() -> None:
    shape = get_model("llama3-405b")
    Layout(pp=16, vp=8).check_model(shape, 8192)
    with pytest.raises(LayoutError, match="fewer than pp·vp = 43·3 = 129 model chunks; use pp·vp ≤ 128"):
        Layout(pp=43, vp=3).check_model(shape, 8192)
    with pytest.raises(LayoutError, match="fewer than pp·vp = 127·1 = 127 model chunks; use pp·vp ≤ 126"):
        Layout(pp=127).check_model(shape, 8192)


def test_stages_of_llama3_8b() -> None:
    run = RunConfig.parse({"model": "llama3-8b", "pp": 4, "seq_length": 8192}).resolve(4, "cuda")
    assert [len(layers) for (layers,) in chunk_layers(run)] == [9, 9, 8, 6]
    even = RunConfig.parse({"model": "llama3-8b", "pp": 4, "stages": "even"}).resolve(4, "cuda")
    assert [len(layers) for (layers,) in chunk_layers(even)] == [8, 8, 8, 8]


def test_groups_partition_the_ranks() -> None:
    layout = Layout(tp=2, cp=2, pp=2, dp=2)
    groups = rank_groups(layout)
    assert groups["tp"][:2] == [[0, 1], [2, 3]]
    assert groups["cp"][0] == [0, 2]
    assert groups["dp"][0] == [0, 4]
    assert groups["pp"][0] == [0, 8]
    for kind, members in groups.items():
        assert sorted(rank for ranks in members for rank in ranks) == list(range(16)), kind


def test_layout_reads_well() -> None:
    assert str(Layout(tp=2, pp=2, dp=2)) == "tp2·pp2·dp2"
    assert str(Layout(dp=1)) == "dp1"
