"""Causal language models of transformers: their configuration, construction, and the names of their stored tensors."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabench.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CONFIG_NAME = "config.json"
# patterns of buffers that older files contain, and that newer versions of transformers compute
_COMPUTED = (
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",
    r"(^|\.)position_ids$",
    r"\.(attn|attention)\.(bias|masked_bias)$",
)


class UnsupportedModelError(UserError):
    """Raised for a Hugging Face model that megabench cannot train exactly as transformers does."""


def reason_of(error: Exception) -> str:
    """Return the message of an exception of transformers, of any type, in one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def load_config(folder: Path) -> "PreTrainedConfig":
    """Return the configuration in `folder` as transformers reads it. Transformers may raise any type of exception."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config


def training_config(folder: Path) -> "PreTrainedConfig":
    """Return the configuration in `folder` without caches, and without dropout, which differs between engines."""
    config = load_config(folder)
    config.use_cache = False
    _disable_dropout(config)
    return config


def _disable_dropout(owner: Any) -> None:
    """Set the dropout rates of a configuration and its parts, or of a module, to zero."""
    from transformers import PreTrainedConfig

    is_dropout = "dropout" in type(owner).__name__.lower()
    for name, value in list(vars(owner).items()):
        if isinstance(value, PreTrainedConfig):
            _disable_dropout(value)
        elif isinstance(value, float) and ("drop" in name or (is_dropout and name == "p")):
            setattr(owner, name, 0.0)


def build_model(config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build a causal language model without dropout and with uninitialized weights, on the default device and dtype."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model.tie_weights()
    for module in model.modules():
        _disable_dropout(module)
    return model


def persistent_buffers(model: "PreTrainedModel") -> dict[str, Any]:
    """Return the buffers that transformers stores with the parameters, by name."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def stored_names(model: "PreTrainedModel", names: Iterable[str]) -> dict[str, str]:
    """Return the names under which transformers stores tensors of `model`, the inverse of `names_in_model`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key

    conversions = reversed(get_model_conversion_mapping(model, add_legacy=False))
    renamings = [
        conversion.reverse_transform()
        for conversion in conversions
        if isinstance(conversion, WeightRenaming) and not isinstance(conversion, PrefixChange)
    ]
    return {name: rename_source_key(name, renamings, [])[0] for name in names}


def names_in_model(model: "PreTrainedModel", stored: Iterable[str]) -> dict[str, str]:
    """Return the name in `model` of every stored tensor. transformers renames some tensors when it loads a model.

    Raise UnsupportedModelError for a tensor that transformers converts to other tensors, instead of renaming it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    tensors, prefix = model.state_dict(), model.base_model_prefix
    names = {}
    for source in stored:
        name, converted = rename_source_key(source, renamings, converters, prefix, tensors)
        if name not in tensors and source in tensors:
            name, converted = source, None
        if converted and name in tensors:
            raise UnsupportedModelError(
                f"transformers converts the stored tensor {source} to {name} when it loads the model, which megabench "
                f"does not support. Load the model with transformers, and save it with "
                f"save_pretrained(..., save_original_format=False)"
            )
        names[source] = name
    return names


def is_ignored(model: "PreTrainedModel", name: str) -> bool:
    """Return whether transformers ignores a stored tensor of this name, because it computes the tensor itself."""
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), *_COMPUTED}
    return name in dict(model.named_buffers()) or any(re.search(pattern, name) for pattern in patterns)
