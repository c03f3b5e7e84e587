"""Small models of every family, as names of the catalogue and as transformers saves them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from megabench.models.catalog import CATALOG
from megabench.models.causal_lm import build_model
from megabench.models.hugging_face import transformers_config
from megabench.models.shape import ModelShape, RopeScaling

# a vocabulary that no tensor-parallel size divides
CATALOG["llama-odd"] = replace(CATALOG["llama-tiny"], name="llama-odd", vocab_size=509)
# an output layer that takes as long as 2.5 layers
CATALOG["llama-vocabulary"] = replace(CATALOG["llama-tiny"], name="llama-vocabulary", vocab_size=4096)
# one head for each of eight tensor-parallel ranks
CATALOG["llama-eight-heads"] = replace(CATALOG["llama-tiny"], name="llama-eight-heads", num_heads=8, num_kv_heads=8)
# the other families, in small
_SCALING = RopeScaling(8.0, 1.0, 4.0, 32)
CATALOG["llama31-tiny"] = replace(CATALOG["llama-tiny"], name="llama31-tiny", rope_scaling=_SCALING)
CATALOG["llama32-tiny"] = replace(
    CATALOG["llama-odd"], name="llama32-tiny", rope_scaling=_SCALING, tied_embeddings=True
)
# whose padding token occurs in the data
CATALOG["llama-padded"] = replace(CATALOG["llama-odd"], name="llama-padded", pad_token_id=300)
CATALOG["llama-padded-tied"] = replace(CATALOG["llama-padded"], name="llama-padded-tied", tied_embeddings=True)
CATALOG["mistral-tiny"] = replace(CATALOG["llama-tiny"], name="mistral-tiny", family="mistral")
CATALOG["qwen2-tiny"] = replace(CATALOG["llama-tiny"], name="qwen2-tiny", family="qwen2", tied_embeddings=True)

# those that have tensor-parallel blocks
FAMILIES = ("llama-tiny", "llama31-tiny", "llama32-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny")


def save_model(
    folder: Path, shape: ModelShape, seed: int = 0, dtype: torch.dtype = torch.float32, **save: Any
) -> torch.nn.Module:
    """A model of `shape`, saved in `folder` by transformers; `save` goes to `save_pretrained`.

    Every parameter is random: at their defaults norms and biases could be swapped unseen.
    """
    return save_config(folder, transformers_config(shape), seed, dtype, **save)


def save_config(
    folder: Path, config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32, **save: Any
) -> torch.nn.Module:
    """The same for the model of a configuration of transformers."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0
            parameter.normal_(around, 0.1 if parameter.ndim == 1 else 0.05, generator=generator)
    model.to(dtype).save_pretrained(folder, **save)
    return model
