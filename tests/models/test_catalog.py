"""The catalogue's shapes against transformers' own count of their parameters."""

import pytest
import torch
from transformers import LlamaForCausalLM

from megabench.models.catalog import CATALOG, UnknownModelError, get_model
from megabench.models.hugging_face import llama_config
from megabench.models.mapping import hugging_face_shapes


@pytest.mark.parametrize("name", CATALOG)
def test_parameters_match_transformers(name: str) -> None:
    shape = get_model(name)
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(shape))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert hugging_face_shapes(shape) == theirs
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_published_sizes() -> None:
    assert get_model("llama3-8b").num_parameters == 8_030_261_248
    assert get_model("llama3-70b").num_parameters == 70_553_706_496


def test_unknown_model_names_near_ones() -> None:
    with pytest.raises(UnknownModelError, match="did you mean llama3-8b"):
        get_model("llama-3-8b")
