"""The catalogue's shapes against transformers' own count of their parameters."""

import pytest
import torch

from megabench.models.catalog import CATALOG, UnknownModelError, get_model
from megabench.models.causal_lm import build_model
from megabench.models.hugging_face import transformers_config
from megabench.models.mapping import hugging_face_shapes


@pytest.mark.parametrize("name", CATALOG)
def test_parameters_match_transformers(name: str) -> None:
    shape = get_model(name)
    with torch.device("meta"):
        model = build_model(transformers_config(shape))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert hugging_face_shapes(shape) == theirs
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_published_sizes() -> None:
    assert get_model("llama3-8b").num_parameters == 8_030_261_248
    assert get_model("llama3-70b").num_parameters == 70_553_706_496
    assert get_model("llama3-405b").num_parameters == 405_853_388_800
    assert get_model("mistral-7b").num_parameters == 7_248_023_552
    assert get_model("qwen3-0.6b").num_parameters == 596_049_920
    assert get_model("qwen3-8b").num_parameters == 8_190_735_360
    assert get_model("gpt2").num_parameters == 124_439_808
    assert get_model("gpt2-xl").num_parameters == 1_557_611_200
    assert get_model("bloom-560m").num_parameters == 559_214_592
    assert get_model("bloom-7b1").num_parameters == 7_069_016_064


def test_unknown_model_names_near_ones() -> None:
    with pytest.raises(UnknownModelError, match="did you mean llama3-8b"):
        get_model("llama-3-8b")
