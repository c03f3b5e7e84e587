"""Which fused kernels a model gets."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from megabench.config import RunConfig
from megabench.engines.common import kernels
from tests.engines.test_families import SMALL
from tests.models.tiny import save_config


def uses_liger(model: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a run on a GPU with Liger uses Liger's kernels."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    run = RunConfig.parse({"model": model, "engine": "ddp", "device": "cpu"}).resolve(1, "cpu")
    return kernels.uses_liger(run.model_copy(update={"device": "cuda"}))


@pytest.mark.parametrize("field", [{"mlp_bias": True}, {"hidden_act": "gelu"}], ids=str)
def test_liger_replaces_no_other_mlp_than_its_own(
    tmp_path: Path, field: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger's MLP has no biases, so that biases in a model's files would be dropped."""
    save_config(tmp_path / "model", LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, **SMALL, **field))
    assert not uses_liger(str(tmp_path / "model"), monkeypatch)
    assert uses_liger("llama-tiny", monkeypatch)
