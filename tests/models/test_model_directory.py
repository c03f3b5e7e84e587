"""Hugging Face directories: what is not whole, or not what megabench computes, is refused in a sentence."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabench.config import RunConfig
from megabench.errors import UserError
from megabench.models.causal_lm import build_model
from megabench.models.find import find_model
from megabench.models.hugging_face import read_shape, transformers_config
from megabench.models.model_directory import INDEX, HuggingFaceWeights
from tests.models.tiny import CATALOG, FAMILIES, save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied model in several files."""
    save_model(tmp_path / "model", CATALOG["llama32-tiny"].with_layers(2), max_shard_size="600KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) >= 3
    return tmp_path / "model"


def unparallel(folder: Path) -> str:
    """Why the megatron engine refuses a model."""
    with pytest.raises(UserError) as error:
        RunConfig.parse({"model": str(folder), "device": "cpu"}).resolve(1, "cpu")
    return str(error.value)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        HuggingFaceWeights(folder)
    return str(error.value)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of the file that holds the first layer's norm."""
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"]["model.layers.0.input_layernorm.weight"]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_of_a_configuration(tmp_path: Path, family: str) -> None:
    save_model(tmp_path / "model", CATALOG[family].with_layers(1))
    found, given = read_shape(tmp_path / "model"), CATALOG[family].with_layers(1)
    for field in ("family", "num_layers", "num_kv_heads", "head_dim", "norm_eps", "rope_theta", "rope_scaling"):
        assert getattr(found, field) == getattr(given, field), field
    assert found.num_parameters == given.num_parameters and found.tied_embeddings == given.tied_embeddings


def test_configurations_of_older_transformers(folder: Path) -> None:
    def age(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope
        config["torch_dtype"] = config.pop("dtype")
        del config["head_dim"]

    expected = read_shape(folder)
    edit(folder / "config.json", age)
    assert read_shape(folder) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, ["mixtures of experts"]),
        ({"model_type": "gpt2"}, ["model_type='gpt2' is not Llama"]),
        ({"model_type": "llama5"}, ["model_type='llama5'", "the installed transformers does not support"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "another activation"]),
        ({"attention_bias": True}, ["attention_bias=True", "biases in attention"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, ["rope_type='yarn'"]),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ["spiral"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, ["config.json"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "quantized"]),
        ({"num_key_value_heads": 3}, ["3"]),
        ({"hidden_size": "wide"}, ["hidden_size", "wide"]),
    ],
)
def test_other_models_are_refused(folder: Path, change: dict[str, Any], words: list[str]) -> None:
    edit(folder / "config.json", lambda config: config.update(change))
    said = unparallel(folder)
    assert all(word in said for word in words) and "\n" not in said, said


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "mistral-tiny": {"sliding_window": 4096},
        "qwen2-tiny": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None},
    }
    for family, change in changes.items():
        save_model(tmp_path / family, CATALOG[family].with_layers(2))
        edit(tmp_path / family / "config.json", partial(dict.update, **change))
        assert "sliding" in unparallel(tmp_path / family)


def test_files_that_are_not_whole(folder: Path) -> None:
    first = min(folder.glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-100])
    assert first.name in refusal(folder) and "complete safetensors" in refusal(folder)
    first.write_bytes(b"")
    assert first.name in refusal(folder)
    first.unlink()
    assert f"{first.name} is missing" in refusal(folder)
    (folder / INDEX).write_text('{"weight_map": {')
    assert "weight_map" in refusal(folder)
    (folder / INDEX).unlink()
    assert "neither model.safetensors nor" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "unpickle" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "config.json" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json cannot be read" in refusal(folder)


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.update({NORM: torch.ones(3)}), [NORM, "[3]", "[128]"]),
        (lambda tensors: tensors.update({NORM: torch.ones(128, dtype=torch.int8)}), [NORM, "dtype I8"]),
        (lambda tensors: tensors.pop(NORM), [NORM, "does not contain"]),
        (lambda tensors: tensors.update({"extra.weight": torch.ones(3)}), ["extra.weight", "does not list it"]),
    ],
)
def test_tensors_that_do_not_belong(folder: Path, change: Callable[..., object], words: list[str]) -> None:
    edit_tensors(folder, change)
    said = refusal(folder)
    assert all(word in said for word in words), said


def test_an_index_that_lies(folder: Path) -> None:
    original = (folder / INDEX).read_text()
    edit(folder / INDEX, lambda index: index["weight_map"].pop(NORM))
    assert NORM in refusal(folder) and "does not list it" in refusal(folder)
    (folder / INDEX).write_text(original)
    edit_tensors(folder, lambda tensors: tensors.pop(NORM))
    edit(folder / INDEX, lambda index: index["weight_map"].pop(NORM))
    assert f"lacks the tensor {NORM}" in refusal(folder)


def test_tied_weights_that_are_there_twice(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", CATALOG["llama32-tiny"].with_layers(1))
    path = tmp_path / "model" / "model.safetensors"
    embedding = load_file(path)["model.embed_tokens.weight"]
    save_file(load_file(path) | {"lm_head.weight": embedding.clone()}, path)
    assert HuggingFaceWeights(tmp_path / "model").num_bytes == sum(p.numel() * 4 for p in model.parameters())
    save_file(load_file(path) | {"lm_head.weight": embedding + 1}, path)
    assert "model.embed_tokens.weight differs from lm_head.weight" in refusal(tmp_path / "model")


def test_buffers_of_older_files_are_passed_over(tmp_path: Path) -> None:
    save_model(tmp_path / "model", CATALOG["llama-tiny"].with_layers(1))
    path = tmp_path / "model" / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path)
    HuggingFaceWeights(tmp_path / "model")


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    """transformers would apply the adapter when it loads the model."""
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "contains an adapter (adapter_config.json)" in refusal(folder) and "Merge" in refusal(folder)
    assert "contains an adapter" in unparallel(folder)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is neither a directory nor a name of the catalogue"):
        find_model(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"has no config\.json\. Give the directory of a model\."):
        find_model(str(tmp_path))
    (tmp_path / "step-00000007" / "hugging_face").mkdir(parents=True)
    (tmp_path / "step-00000007" / "hugging_face" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"Give one of the checkpoints, for example .*step-00000007"):
        find_model(str(tmp_path))


def test_a_model_with_its_own_code_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *arguments: "y")
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: pass\nclass M: pass\n")
    auto_map = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    edit(folder / "config.json", lambda config: config.update(model_type="own", auto_map=auto_map))
    with pytest.raises(UserError, match=r"needs its own Python code \(auto_map in config.json\), which megabench does"):
        read_shape(folder)
    assert not ran.exists()


def test_code_beside_a_known_model_is_not_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has a model of this type itself, and that is the one that is used."""
    monkeypatch.setattr("builtins.input", lambda *arguments: "y")
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: pass\nclass M: pass\n")
    auto_map = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    edit(folder / "config.json", lambda config: config.update(auto_map=auto_map))
    assert build_model(transformers_config(read_shape(folder))).config.model_type == "llama"
    assert not ran.exists()
