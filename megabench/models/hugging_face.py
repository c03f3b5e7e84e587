"""Conversion between model shapes and transformers: configurations, models, and shapes read from config.json.

The tensor-parallel blocks of megabench reject every configuration that they would compute differently from
transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabench.errors import UserError
from megabench.inputs import LARGE, read_json
from megabench.models.causal_lm import (
    CONFIG_NAME,
    UnsupportedModelError,
    build_model,
    load_config,
    reason_of,
    training_config,
)
from megabench.models.families import FAMILIES
from megabench.models.foreign import check_is_causal, foreign_shape
from megabench.models.shape import ModelShape, RopeScaling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"

# Maps a field of transformers' configuration to the required value and to the meaning of any other value.
_REQUIRED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "another activation"),
    "attention_bias": (False, "biases in attention"),
    "mlp_bias": (False, "biases in the MLP"),
    "attention_dropout": (0.0, "dropout in attention"),
    "sliding_window": (None, "attention over a sliding window"),
    "use_sliding_window": (False, "attention over a sliding window"),
    "is_causal": (True, "attention to later tokens"),
    "is_encoder_decoder": (False, "an encoder and a decoder"),
}
# configuration fields that determine the shape
_TAKEN = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "layer_types",
    "max_position_embeddings", "pad_token_id",
}  # fmt: skip
# configuration fields that do not affect training
_IGNORED = {
    "transformers_version", "architectures", "output_hidden_states", "output_attentions", "return_dict", "dtype",
    "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type", "initializer_range", "use_cache",
    "bos_token_id", "eos_token_id", "pretraining_tp", "max_window_layers", "_name_or_path", "_attn_implementation",
    "_attn_implementation_autoset", "_commit_hash", "attn_implementation", "tie_last_hidden_states", "tokenizer_class",
    "finetuning_task", "task_specific_params", "torchscript", "use_bfloat16", "is_decoder", "add_cross_attention",
    "cross_attention_hidden_size", "unsloth_version", "unsloth_fixed", "auto_map", "transformers.js_config",
    "is_llama_config",
}  # fmt: skip
# configuration fields of older transformers, which newer versions read into other fields
_OLDER = {"rope_theta", "rope_scaling", "torch_dtype"}
_ROPE_TYPES = ("default", "llama3")
# parts of the configurations of multimodal models, and the kind of such a model
_MODALITIES = {
    "vision_config": "a vision-language",
    "vq_config": "a vision-language",
    "image_config": "a vision-language",
    "audio_config": "an audio-language",
    "audio_encoder": "an audio-language",
    "text_config": "a multimodal",
}


def transformers_config(shape: ModelShape) -> "PreTrainedConfig":
    """Return the transformers configuration of a model with the given shape."""
    from transformers import AutoConfig

    if shape.foreign:
        return training_config(Path(shape.foreign.config_folder))
    common: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "pad_token_id": shape.pad_token_id,
        "tie_word_embeddings": shape.tied_embeddings,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    special: dict[str, Any]
    heads = {"num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads}
    if shape.family == "gpt2":
        special = {"n_layer": shape.num_layers, "n_head": shape.num_heads, "n_inner": shape.ffn_size}
        special |= {"n_positions": shape.num_positions, "layer_norm_epsilon": shape.norm_eps}
        special |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        if shape.vocab_size < 50257:  # GPT-2's default BOS and EOS token is the last of its full vocabulary
            special |= {"bos_token_id": None, "eos_token_id": None}
    elif shape.family == "bloom":
        special = {"n_layer": shape.num_layers, "n_head": shape.num_heads, "layer_norm_epsilon": shape.norm_eps}
        special |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        special |= {"attn_implementation": "eager"}  # transformers supports BLOOM's ALiBi only with eager attention
    else:
        special = heads | {
            "intermediate_size": shape.ffn_size,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.num_positions or shape.seq_length,
            "rms_norm_eps": shape.norm_eps,
            "rope_parameters": _rope_parameters(shape),
            "attention_dropout": 0.0,
        }
        if shape.family == "mistral":
            special["sliding_window"] = None
    return AutoConfig.for_model(shape.family, **(common | special))


def _rope_parameters(shape: ModelShape) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", **vars(shape.rope_scaling)} if shape.rope_scaling else {"rope_type": "default"}
    return scaling | {"rope_theta": shape.rope_theta}


def config_text(shape: ModelShape) -> bytes:
    """Return the content of config.json for a model that has no Hugging Face directory yet.

    The file describes the rotary embedding twice: in the fields of transformers 5 and in those of transformers 4, which
    otherwise computes with its default frequencies.
    """
    import torch

    config = transformers_config(shape)
    config.use_cache = True
    with torch.device("meta"):
        model = build_model(transformers_config(shape.with_layers(1)))
    content = config.to_diff_dict() | {"architectures": [type(model).__name__]}
    if rope := content.get("rope_parameters"):
        content["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            content["rope_scaling"] = {field: value for field, value in rope.items() if field != "rope_theta"}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of the config.json in `folder`. Raise UnsupportedModelError if the file cannot be read."""
    path = folder / CONFIG_NAME
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("the file must contain a JSON object")
    except OSError as error:
        raise UnsupportedModelError(
            f"{path} cannot be read: {error.strerror}. Give the directory of a model."
        ) from None
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not a model configuration: {error}. Download {path} again.") from None
    return content


def own_code(folder: Path) -> str | None:
    """Return where a directory refers to its own Python code, such as "auto_map in config.json", or None."""
    for name in (TOKENIZER_CONFIG_NAME, CONFIG_NAME):
        try:
            content = read_json(folder / name, LARGE)
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("auto_map"):
            return f"auto_map in {name}"
    return None


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of the model whose config.json is in `folder`. The shape's name is the path of `folder`.

    If megabench's tensor-parallel blocks cannot compute the model as transformers does, `foreign.reason` of the shape
    names the unsupported field. Raise UnsupportedModelError for a configuration without a causal language model in
    transformers, and for a model that cannot be trained, such as a quantized model.
    """
    path, content = folder / CONFIG_NAME, read_config(folder)
    if (folder / ADAPTER_CONFIG_NAME).exists():
        raise UnsupportedModelError(
            f"{folder} contains an adapter ({ADAPTER_CONFIG_NAME}), which changes the model and which megabench does "
            f"not train. Merge the adapter into the weights, or remove {ADAPTER_CONFIG_NAME}."
        )
    from transformers import CONFIG_MAPPING

    family = content.get("model_type")
    if not family or not isinstance(family, str):
        raise UnsupportedModelError(f"{path} has no model_type. Use the {CONFIG_NAME} that belongs to the model.")
    if family not in CONFIG_MAPPING:
        if code := own_code(folder):
            raise UnsupportedModelError(
                f"{folder} needs its own Python code ({code}), which megabench does not run. Use a model that "
                f"transformers supports without additional code."
            )
        raise UnsupportedModelError(
            f"{path}: the installed transformers does not support model_type={family!r}. Use another model, or upgrade "
            f"transformers."
        )
    if parts := [name for name in _MODALITIES if name in CONFIG_MAPPING[family].sub_configs]:
        raise UnsupportedModelError(
            f"{path}: model_type={family!r} is {_MODALITIES[parts[0]]} model ({', '.join(parts)}), and megabench "
            f"trains only models of text. Use a causal language model."
        )
    if content.get("quantization_config"):
        raise UnsupportedModelError(
            f"{path}: quantized weights cannot be trained (quantization_config is set). Use unquantized weights."
        )
    try:
        config = load_config(folder)
        check_is_causal(config, path)
        sizes = _sizes(config)
    except UserError:
        raise
    except Exception as error:  # the checks in transformers raise many types of exceptions
        raise UnsupportedModelError(f"transformers rejects {path} ({reason_of(error)}). Correct {path}.") from None
    for field, value in sizes.items():
        if value is None:
            raise UnsupportedModelError(
                f"{path}: megabench does not know the {field} of a model with model_type={family!r}. Use another model."
            )
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"{path}: {field}={value!r} is not a positive integer. Correct {path}.")
    common: dict[str, Any] = {
        "name": str(folder),
        "family": family,
        "tied_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "seq_length": min(sizes["num_positions"], 4096),
        "micro_batch": 1,
        "global_batch": 32,
        "learning_rate": 2e-5,
        "lr_warmup": 20,
        "source": f"{path}; default settings for fine-tuning (learning rate: arXiv 2307.09288 section 3.1)",
        **sizes,
    }
    try:
        _check(config, content, path)
    except UnsupportedModelError as error:
        return foreign_shape(folder, common, str(error))
    rope = config.rope_parameters
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = RopeScaling(**{field.name: _number(rope, field.name, path) for field in fields(RopeScaling)})
    return ModelShape(
        **common,
        norm_eps=_number(vars(config), "rms_norm_eps", path),
        rope_theta=float(_number(rope, "rope_theta", path)),
        rope_scaling=scaling,
        pad_token_id=_padding_token(config, path),
    )


def _number(values: Mapping[str, Any], field: str, path: Path) -> Any:
    if isinstance(value := values.get(field), bool) or not isinstance(value, int | float):
        raise UnsupportedModelError(f"{path}: {field}={value!r} is not a number. Correct {path}.")
    return value


def _padding_token(config: "PreTrainedConfig", path: Path) -> int | None:
    """Return the token whose embedding torch.nn.Embedding does not train. A negative id counts from the end."""
    token, size = config.pad_token_id, config.vocab_size
    if token is None:
        return None
    if isinstance(token, int) and -size <= token < size:
        return token % size
    raise UnsupportedModelError(
        f"{path}: pad_token_id={token} is outside the vocabulary of {size} tokens. Correct pad_token_id."
    )


def _sizes(config: Any) -> dict[str, Any]:
    """Return the sizes of a model. Sizes that the configuration omits are derived from other sizes."""
    layers = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]

    def size(name: str) -> Any:
        """Return a size, or the largest one of all layers if layers have different sizes."""
        values: list[Any] = []
        for layer in layers:
            value = getattr(layer, name, None)
            values += value if isinstance(value, list) else [value]
        return max((value for value in values if value is not None), default=None)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = size("head_dim") or (hidden // heads if heads and hidden else None)
    return {
        "num_layers": size("num_hidden_layers"),
        "hidden_size": hidden,
        # without attention, such as in Mamba, one head of size 1 adds almost nothing to the FLOPs
        "num_heads": heads or 1,
        "num_kv_heads": size("num_key_value_heads") or heads or 1,
        "head_dim": head_dim if heads else 1,
        "ffn_size": size("intermediate_size") or (4 * hidden if hidden else None),
        "vocab_size": size("vocab_size"),
        "num_positions": size("max_position_embeddings") or 2048,
    }


def _check(config: Any, content: dict[str, Any], path: Path) -> None:
    """Raise UnsupportedModelError if megabench's tensor-parallel blocks compute a configuration unlike transformers.

    `content` is the content of config.json, which may have fields that `config` does not declare.
    """
    from transformers import GenerationConfig

    if (family := config.model_type) not in FAMILIES or not FAMILIES[family].has_parallel_blocks:
        raise UnsupportedModelError(f"{path}: model_type={family!r} is not Llama, Mistral or Qwen")
    if layers := content.get("per_layer_config"):
        raise _refusal(path, "per_layer_config", layers, None, "layers that differ from each other")
    if config.num_attention_heads % (config.num_key_value_heads or config.num_attention_heads):
        raise UnsupportedModelError(
            f"{path}: num_key_value_heads={config.num_key_value_heads} does not divide num_attention_heads="
            f"{config.num_attention_heads}; correct the file"
        )
    for field, (wanted, meaning) in _REQUIRED.items():
        if (value := getattr(config, field, wanted)) != wanted:
            raise _refusal(path, field, value, wanted, meaning)
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise _refusal(
            path, "layer_types", sorted(set(config.layer_types)), ["full_attention"], "another kind of attention"
        )
    rope = config.rope_parameters or {}
    if (kind := rope.get("rope_type")) not in _ROPE_TYPES:
        raise _refusal(path, "rope_type", kind, " or ".join(_ROPE_TYPES), "another rotary embedding")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refusal(path, "partial_rotary_factor", rope["partial_rotary_factor"], 1.0, "a partial rotary embedding")
    declared, generation = type(config)().to_dict(), GenerationConfig().to_dict()
    known = _TAKEN | _IGNORED | _OLDER | _REQUIRED.keys() | generation.keys()
    for field, value in (content | config.to_dict()).items():
        is_off = field not in declared and not value  # such as use_mrope=false of Qwen2.5
        if field not in known and not is_off and value != (default := declared.get(field)):
            raise _refusal(path, field, value, default, "a feature that megabench does not support")


def _refusal(path: Path, field: str, value: object, wanted: object, meaning: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: {field}={value!r} means {meaning}, which megabench's tensor-parallel blocks do not support "
        f"({field} must be {wanted!r})"
    )


def config_difference(there: ModelShape, here: ModelShape) -> str | None:
    """Return how the configurations of two models that only transformers computes differ, or None if they are equal.

    The other fields of the shape of such a model are only its sizes. The result names the first different field.
    """
    one, other = (transformers_config(shape).to_dict() for shape in (there, here))
    for field in sorted((one.keys() | other.keys()) - _IGNORED):
        if one.get(field) != other.get(field):
            return f"{field} {one.get(field)!r} there, {other.get(field)!r} here"
    return None
