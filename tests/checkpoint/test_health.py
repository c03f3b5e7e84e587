"""Non-finite values are found wherever they are, by whatever tensor holds them."""

import math

import pytest
import torch

from megabench.checkpoint.health import count_non_finite, describe_non_finite, is_finite
from megabench.checkpoint.shards import StateShard, blocks_of, whole

CUT = whole("lm_head.weight", (8, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 500, -1])
def test_one_value_is_enough(dtype: torch.dtype, value: float, place: int) -> None:
    good, bad = torch.randn(1001).to(dtype), torch.randn(1001).to(dtype)
    bad[place] = value
    assert is_finite([good, bad, torch.empty(0), good[:3]]) == [True, False, True, True]


def test_the_largest_values_are_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        limits = torch.finfo(dtype)
        assert is_finite([torch.tensor([limits.max, limits.min, limits.tiny], dtype=dtype)]) == [True]


def test_counts_are_of_owned_elements_by_tensor() -> None:
    blocks = blocks_of(CUT, 0, 16)
    values = torch.ones(16)
    values[3:6] = math.nan
    shards = [
        StateShard("weight", blocks, values),
        StateShard("exp_avg", blocks, torch.ones(16)),
        StateShard("exp_avg_sq", blocks, values, is_owner=False),
        StateShard("weight", blocks, values),
    ]
    assert count_non_finite(shards) == {"weight lm_head.weight": 6}
    assert count_non_finite([]) == {}


def test_the_first_tensors_are_named() -> None:
    assert describe_non_finite({"weight a": 1}) == "1 value of the training state is NaN or infinite: weight a (1)"
    counts = {f"weight {name}": 2000 for name in "abcde"}
    assert describe_non_finite(counts) == (
        "10,000 values of the training state are NaN or infinite: weight a (2,000), weight b (2,000), "
        "weight c (2,000) and 2 more tensors"
    )
