"""Over gloo, tensor-parallel products in the order of the copy engines train as products of whole tensors do."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.engines.megatron.exchange import Alone, Collectives, Gathering, Messages, Product, largest_of
from tests import distributed
from tests.engines.equivalence import (
    OPTIMIZERS,
    TOLERANCE,
    Trace,
    assert_equal_to_reference,
    differences,
    reference_of,
    resolve,
    train,
    worst,
)

pytestmark = pytest.mark.distributed

PARTS: dict[str, Any] = {"tp_overlap": "copy-engines", **OPTIMIZERS["adamw"]}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "micro_batch": 2}),
    "tp4": (4, {"tp": 4}),
    "tp8": (8, {"tp": 8, "model": "llama-eight-heads"}),
    "tp2-recompute": (2, {"tp": 2, "recompute": "full"}),
    "tp2-recompute-selective": (2, {"tp": 2, "recompute": "selective"}),
    "tp2-dp2": (4, {"tp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2, "micro_batch": 2}),
    "tp2-pp2-vp2": (4, {"tp": 2, "pp": 2, "vp": 2}),
    "tp4-pp2": (8, {"tp": 4, "pp": 2}),
    "tp2-biases": (2, {"tp": 2, "model": "qwen2-tiny"}),
}


def exchanged(num_rows: int) -> dict[str, tuple[list[int], Tensor, Tensor]]:
    """The first rows of the parts in the order of their arrival, the gathered tensor and the sum of each exchange."""
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    part = torch.full((num_rows, 3), float(rank)) + torch.arange(num_rows).unsqueeze(1)
    whole = torch.arange(num_rows * size * 2.0).view(num_rows * size, 2) * (rank + 1)
    found = {}
    for way in (Collectives(group), Messages(group)):
        gathering = way.gather(part)
        finish = way.reduce_scatter(lambda rows: whole[rows] + 1, num_rows * size)
        found[type(way).__name__] = ([rows.start for rows, _ in gathering], gathering.wait(), finish())
    return found


def largest(values: tuple[float, ...]) -> float:
    return largest_of(torch.tensor(values[dist.get_rank()]), dist.group.WORLD).item()


@pytest.mark.parametrize("values", [(1.5, -2.0), (0.0, float("inf")), (3.0, float("nan")), (float("nan"), 3.0)])
def test_the_largest_magnitude_is_not_a_number_if_a_rank_has_none(values: tuple[float, float]) -> None:
    expected = float(torch.tensor(values).abs().max())  # torch's maximum keeps NaN
    assert distributed.run(largest, 2, values) == pytest.approx([expected] * 2, nan_ok=True)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_move_what_collectives_move(size: int) -> None:
    num_rows = 5
    for rank, found in enumerate(distributed.run(exchanged, size, num_rows)):
        (_, *expected), (order, *parts) = found["Collectives"], found["Messages"]
        assert order == [(rank - step) % size * num_rows for step in range(size)]
        for one, other in zip(parts, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_one_rank_has_everything() -> None:
    part = torch.ones(4, 2)
    assert Alone().gather(part).wait() is part
    assert Alone().reduce_scatter(lambda rows: part[rows], 4)().equal(part)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_in_parts(layout: str) -> None:
    world_size, fields = LAYOUTS[layout]
    assert_equal_to_reference(world_size, **fields, **PARTS)


def gather_swapped(self: Messages, part: Tensor) -> Gathering:
    """Each of two ranks takes the other rank's part for its own."""
    whole = torch.cat(GATHER(self, part).wait().chunk(2)[::-1])
    return Gathering(whole, iter([(slice(0, len(whole)), whole)]))


def reduce_swapped(self: Messages, product: Product, num_rows: int) -> Callable[[], Tensor]:
    """Each of two ranks gets the other rank's part of the sum."""
    half = num_rows // 2
    return REDUCE(self, lambda rows: product(slice(half - rows.start, num_rows - rows.start)), num_rows)


GATHER, REDUCE = Messages.gather, Messages.reduce_scatter
SWAPPED: dict[str, Any] = {"gather": gather_swapped, "reduce_scatter": reduce_swapped}


def train_swapped(run: ResolvedConfig, method: str) -> Trace:
    with patch.object(Messages, method, SWAPPED[method]):
        return train(run)


@pytest.mark.parametrize("method", SWAPPED)
def test_swapped_parts_show(method: str) -> None:
    fields = {"tp": 2, **PARTS}
    trace = distributed.run(train_swapped, 2, resolve(2, **fields), method)[0]
    name, difference = worst(differences(trace, reference_of(**fields)))
    assert difference > 100 * TOLERANCE, f"{name} differs most, by {difference:.1e}"
