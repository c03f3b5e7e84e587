"""The rotary frequencies against transformers' own."""

import pytest
import torch

from megabench.models.causal_lm import build_model
from megabench.models.hugging_face import transformers_config
from megabench.models.rotary import rotary_frequencies
from tests.models.tiny import CATALOG

ROTARY = [name for name, shape in CATALOG.items() if shape.rope_theta]


@pytest.mark.parametrize("name", ROTARY)
def test_they_are_those_of_transformers(name: str) -> None:
    shape = CATALOG[name]
    with torch.device("meta"):
        rotary = build_model(transformers_config(shape.with_layers(1))).base_model.rotary_emb
    theirs = type(rotary)(rotary.config).inv_freq
    torch.testing.assert_close(rotary_frequencies(shape), theirs, rtol=1e-6, atol=0.0)


def test_scaling_changes_slow_frequencies_alone() -> None:
    plain, scaled = (rotary_frequencies(CATALOG[name]) for name in ("llama3-70b", "llama3-405b"))
    ratio = plain / scaled
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8) and (ratio.diff() >= -1e-6).all()
