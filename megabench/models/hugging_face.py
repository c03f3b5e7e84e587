"""Conversion between model shapes and transformers: configurations, models, and shapes read from config.json.

The tensor-parallel blocks of megabench reject every configuration that they would compute differently from
transformers.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabench import UserError
from megabench.models.families import FAMILIES, Family, Rule
from megabench.models.shape import Foreign, ModelShape, RopeScaling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CONFIG_NAME = "config.json"
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
}
# configuration fields that determine the shape
_TAKEN = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "layer_types",
    "max_position_embeddings",
}  # fmt: skip
# configuration fields that do not affect training
_IGNORED = {
    "transformers_version", "architectures", "output_hidden_states", "output_attentions", "return_dict", "dtype",
    "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "initializer_range",
    "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp", "max_window_layers", "_name_or_path",
}  # fmt: skip
_ROPE_TYPES = ("default", "llama3")


class UnsupportedModelError(UserError):
    """Raised for a Hugging Face model that megabench cannot train exactly as transformers does."""


def transformers_config(shape: ModelShape) -> "PreTrainedConfig":
    """Return the transformers configuration of a model with the given shape."""
    from transformers import AutoConfig

    if shape.foreign:
        return _foreign_config(Path(shape.foreign.config_folder))
    common: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
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
        if shape.vocab_size < 50257:  # GPT-2's default BOS and EOS tokens are the last token of its full vocabulary
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


def build_model(config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build a configuration's causal language model with uninitialized weights, on the default device and dtype."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model.tie_weights()
    return model


def config_text(shape: ModelShape) -> bytes:
    """Return the content of config.json for a model that has no Hugging Face directory yet."""
    config = transformers_config(shape)
    config.use_cache = True
    with_class = config.to_diff_dict() | {"architectures": [type(_on_meta(shape)).__name__]}
    return (json.dumps(with_class, indent=2, sort_keys=True) + "\n").encode()


def _on_meta(shape: ModelShape) -> "PreTrainedModel":
    """Build a one-layer model on the meta device, without weights."""
    import torch

    with torch.device("meta"):
        return build_model(transformers_config(shape.with_layers(1)))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of the config.json in `folder`. Raise UnsupportedModelError if the file cannot be read."""
    path = folder / CONFIG_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
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
            content = json.loads((folder / name).read_text(encoding="utf-8"))
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
    from transformers import CONFIG_MAPPING, AutoConfig

    family = content.get("model_type")
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
    if content.get("quantization_config"):
        raise UnsupportedModelError(
            f"{path}: quantized weights cannot be trained (quantization_config is set). Use unquantized weights."
        )
    try:
        config = AutoConfig.for_model(family, **{k: v for k, v in content.items() if k != "model_type"})
        sizes = _sizes(config)
    except Exception as error:  # the checks in transformers raise many types of exceptions
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedModelError(f"transformers rejects {path} ({reason}). Correct {path}.") from None
    for field, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"{path}: {field}={value!r} is not a positive integer. Correct {path}.")
    common: dict[str, Any] = {
        "name": str(folder),
        "family": family,
        "tied_embeddings": bool(config.tie_word_embeddings),
        "seq_length": min(sizes["num_positions"], 4096),
        "micro_batch": 1,
        "global_batch": 32,
        "learning_rate": 2e-5,
        "lr_warmup": 20,
        "source": f"{path}; default settings for fine-tuning (learning rate: arXiv 2307.09288 section 3.1)",
        **sizes,
    }
    try:
        _check(config, path)
    except UnsupportedModelError as error:
        return _foreign_shape(folder, common, str(error))
    rope = config.rope_parameters
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = RopeScaling(**{field.name: rope[field.name] for field in fields(RopeScaling)})
    return ModelShape(
        **common, norm_eps=config.rms_norm_eps, rope_theta=float(rope["rope_theta"]), rope_scaling=scaling
    )


def _sizes(config: Any) -> dict[str, Any]:
    """Return the sizes of a model. Sizes that the configuration omits are derived from other sizes."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "ffn_size": getattr(config, "intermediate_size", None) or 4 * hidden,
        "vocab_size": config.vocab_size,
        "num_positions": getattr(config, "max_position_embeddings", None) or 2048,
    }


def _foreign_shape(folder: Path, common: dict[str, Any], reason: str) -> ModelShape:
    """Return the shape of a model whose tensors are known only to transformers."""
    import torch
    from torch import nn

    path = folder / CONFIG_NAME
    try:
        with torch.device("meta"):
            model = build_model(_foreign_config(folder))
    except Exception as error:
        raise UnsupportedModelError(f"{path}: transformers cannot build a causal language model: {error}") from None
    sizes = {name: " ".join(map(str, parameter.shape)) for name, parameter in model.named_parameters()}
    if experts := next((name for name in sizes if "expert" in name), None):
        raise UnsupportedModelError(
            f"{path}: mixtures of experts are not supported (parameter {experts}). Use a dense model."
        )
    embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    looked_up = [n for n, module in model.named_modules() if isinstance(module, nn.Embedding)]
    first = [embedding, *(name for name in sizes if name.rpartition(".")[0] in looked_up and name != embedding)]
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    layers = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    table = Family(
        name=common["family"],
        layer_prefix=f"{layers}.",
        first=(Rule(None, {name: sizes[name] for name in first}, "whole"),),
        layer=(),
        last=(Rule(None, {name: size for name, size in sizes.items() if name not in first}, "whole"),),
        residual=(),
    )
    return ModelShape(**common, norm_eps=0.0, foreign=Foreign(table, str(folder), reason))


def _foreign_config(folder: Path) -> "PreTrainedConfig":
    """Return the configuration in `config_folder` with dropout disabled, because engines draw different dropout."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.use_cache = False
    for field, value in config.to_dict().items():
        if isinstance(value, float) and field.endswith(("dropout", "pdrop", "drop")):
            setattr(config, field, 0.0)
    return config


def _check(config: Any, path: Path) -> None:
    """Raise UnsupportedModelError if megabench's tensor-parallel blocks compute a configuration unlike transformers."""
    if (family := config.model_type) not in FAMILIES or not FAMILIES[family].has_parallel_blocks:
        raise UnsupportedModelError(f"{path}: model_type={family!r} is not Llama, Mistral or Qwen")
    if config.num_attention_heads % (config.num_key_value_heads or config.num_attention_heads):
        raise UnsupportedModelError(
            f"{path}: num_key_value_heads={config.num_key_value_heads} does not divide num_attention_heads="
            f"{config.num_attention_heads}; correct the file"
        )
    declared = type(config)().to_dict()
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
    for field, default in declared.items():
        if field not in _TAKEN | _IGNORED | _REQUIRED.keys() and (value := getattr(config, field, default)) != default:
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
