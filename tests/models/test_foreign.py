"""Models that only transformers computes: what is read exactly, and what is refused before training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from megabench.config import RunConfig
from megabench.errors import UserError
from megabench.models.causal_lm import build_model, training_config
from megabench.models.hugging_face import read_shape
from megabench.models.mapping import whole_piece
from megabench.models.model_directory import HuggingFaceWeights
from tests.models.tiny import CATALOG, save_config, save_model

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def tiny(family: str, **fields: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[family](**(SIZES | fields))


def write_config(folder: Path, config: PreTrainedConfig, **fields: Any) -> Path:
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        read_shape(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_read_as_transformers_reads(folder: Path) -> None:
    """The tensors of the directory, by megabench's names, are those of the model that transformers loads."""
    weights = HuggingFaceWeights(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, size in weights.sizes.items():
        tensor = model.get_parameter_or_buffer(name)
        assert torch.equal(weights.read(whole_piece(name, size)).view(size), tensor), name
    assert weights.sizes.keys() >= {name for name, _ in model.named_parameters()}


MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 48}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}
GPT_NEO = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}


# -- models whose tokens see later tokens, or that are more than a language model


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("llama", {"is_causal": False}, ["is_causal=False", "later tokens"]),
        ("gemma", {"use_bidirectional_attention": True, "head_dim": 8}, ["use_bidirectional_attention=True"]),
        ("bert", {}, ["BertLMHeadModel is an encoder", "is_decoder=true"]),
        ("roberta", {}, ["is an encoder"]),
        ("cpmant", {}, ["model_type='cpmant'", "later tokens"]),
        ("trocr", {"d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 48}, ["encoder_attn", "no gradient"]),
        ("qwen2_vl", {}, ["a vision-language model (vision_config, text_config)"]),
        ("qwen2_audio", {}, ["an audio-language model"]),
        ("t5", {}, ["no causal language model for model_type='t5'"]),
        ("reformer", {}, ["hashes with random numbers"]),
    ],
)
def test_models_that_are_refused(tmp_path: Path, family: str, fields: dict[str, Any], words: list[str]) -> None:
    said = refusal(write_config(tmp_path, tiny(family), **fields))
    assert all(word in said for word in words), said


def test_a_decoder_of_an_encoders_family_is_accepted(tmp_path: Path) -> None:
    assert read_shape(write_config(tmp_path, tiny("bert", is_decoder=True), is_decoder=True)).foreign


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (
            {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
            "rope_type='su' is unknown; known types: default",
        ),
        ({"pad_token_id": 64}, "pad_token_id=64 is outside the vocabulary of 64 tokens"),
        ({"model_type": None}, "has no model_type"),
    ],
)
def test_configurations_that_are_wrong(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    assert word in refusal(write_config(tmp_path, tiny("llama"), **change))


# -- the tensor-parallel blocks know every field that they accept


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_sink", 4),
        ("per_layer_config", {"1": {"intermediate_size": 64}}),
        ("original_max_position_embeddings", 16),
        ("is_encoder_decoder", True),
    ],
)
def test_blocks_refuse_an_unknown_field(tmp_path: Path, field: str, value: object) -> None:
    write_config(tmp_path, tiny("llama"), **{field: value})
    with pytest.raises(UserError, match=field):
        RunConfig.parse({"model": str(tmp_path), "device": "cpu"}).resolve(1, "cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.6),
        ("is_causal", True),
        ("torch_dtype", "float32"),
        ("_name_or_path", "x"),
        ("unsloth_version", "x"),
        ("use_mrope", False),  # Qwen2.5
        ("is_llama_config", True),  # SmolLM2
        ("rope_interleaved", False),
        ("transformers.js_config", {"dtype": "q4"}),
        ("auto_map", {}),
    ],
)
def test_blocks_accept_fields_that_change_no_computation(tmp_path: Path, field: str, value: object) -> None:
    assert not read_shape(write_config(tmp_path, tiny("llama"), **{field: value})).foreign


def test_the_padding_token(tmp_path: Path) -> None:
    for given, expected in ((None, None), (0, 0), (63, 63), (-1, 63)):
        assert read_shape(write_config(tmp_path, tiny("llama"), pad_token_id=given)).pad_token_id == expected


# -- dropout, whatever its field is called


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("biogpt", {}), ("gpt2", {}), ("opt", OPT), ("mpt", MPT), ("starcoder2", {}), ("bert", {"is_decoder": True}),
        ("gpt_neo", GPT_NEO),
    ],
)  # fmt: skip
def test_no_dropout_remains(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    config = tiny(family, **fields)
    text = json.loads(write_config(tmp_path, config).joinpath("config.json").read_text())
    rates = {name: 0.1 for name, value in text.items() if "drop" in name and isinstance(value, float)}
    write_config(tmp_path, config, **rates)
    torch.manual_seed(0)
    model = build_model(training_config(tmp_path)).train()
    model.init_weights()
    one, other = (model(input_ids=torch.arange(4, 20)[None]).logits for _ in range(2))
    assert torch.equal(one, other) and one.std() > 0


# -- positions


@pytest.mark.parametrize(
    ("family", "fields", "longest"),
    [
        ("gpt2", {}, 64),
        ("opt", OPT, 64),  # two rows of the table are no positions
        ("roberta", {"is_decoder": True, "pad_token_id": 1}, 62),  # positions start after the padding token
        ("gptj", {"rotary_dim": 8}, 64),
        ("mpt", MPT, 48),
        ("gemma", {"head_dim": 8}, None),
    ],
)
def test_positions(tmp_path: Path, family: str, fields: dict[str, Any], longest: int | None) -> None:
    shape = read_shape(write_config(tmp_path, tiny(family, **fields), **fields))
    assert shape.max_seq_length == longest
    if not longest:
        return
    model = build_model(training_config(tmp_path))
    model.init_weights()
    model.eval()(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))
    fields = {"model": str(tmp_path), "engine": "ddp", "device": "cpu", "seq_length": longest + 1}
    with pytest.raises(UserError, match=f"seq_length={longest + 1} exceeds the {longest} positions"):
        RunConfig.parse(fields).resolve(1, "cpu")


# -- tensors and their names


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mamba", {"state_size": 8, "time_step_rank": 4}),  # [channels, 1, kernel], and no attention
        ("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}),  # time_step_limit is infinite
        ("rwkv", {"attention_hidden_size": 32, "context_length": 64}),
        ("apertus", {}),  # persistent buffers
        ("gpt_neox", {}),  # transformers stores the head under another name
    ],
)
def test_tensors_are_read_as_transformers_reads_them(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    save_config(tmp_path, tiny(family, **fields))
    if family == "apertus":
        path = tmp_path / "model.safetensors"
        save_file({name: t + 0.25 if "act_fn" in name else t for name, t in load_file(path).items()}, path)
    assert_read_as_transformers_reads(tmp_path)


def rename(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def test_names_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    save_model(tmp_path, CATALOG["llama-tiny"].with_layers(1))
    rename(tmp_path, lambda name: name.removeprefix("model."))
    assert_read_as_transformers_reads(tmp_path)


def test_a_tied_weight_under_the_name_of_the_output_layer(tmp_path: Path) -> None:
    save_model(tmp_path, CATALOG["llama32-tiny"].with_layers(1))
    rename(tmp_path, lambda name: name.replace("model.embed_tokens", "lm_head"))
    assert_read_as_transformers_reads(tmp_path)


def test_tensors_that_transformers_computes_are_ignored(tmp_path: Path) -> None:
    save_model(tmp_path, CATALOG["llama-tiny"].with_layers(1))
    path = tmp_path / "model.safetensors"
    caches = {f"model.layers.0.self_attn.rotary_emb.{name}": torch.ones(8) for name in ("inv_freq", "cos_cached")}
    save_file(load_file(path) | caches, path)
    assert_read_as_transformers_reads(tmp_path)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_of_a_wrapper_are_refused(tmp_path: Path, prefix: str) -> None:
    save_model(tmp_path, CATALOG["llama-tiny"].with_layers(1))
    rename(tmp_path, lambda name: prefix + name)
    with pytest.raises(UserError, match="the prefix of a wrapper"):
        HuggingFaceWeights(tmp_path)


def test_a_single_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, CATALOG["llama-tiny"].with_layers(2), max_shard_size="300KB")
    assert len(HuggingFaceWeights(tmp_path).sizes) > 2
    save_file({"model.norm.weight": torch.ones(128)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"both model.safetensors and model.safetensors.index.json"):
        HuggingFaceWeights(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/tmp/outside.safetensors"])
def test_an_index_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, CATALOG["llama-tiny"].with_layers(2), max_shard_size="300KB")
    path = tmp_path / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="which is not the name of a file beside it"):
        HuggingFaceWeights(tmp_path)
