"""Small models as transformers saves them, every parameter random: what is at its default could be swapped unseen."""

from pathlib import Path
from typing import Any

import torch

from megabench.models.hugging_face import build_model, transformers_config
from megabench.models.shape import ModelShape


def save_model(
    folder: Path, shape: ModelShape, seed: int = 0, dtype: torch.dtype = torch.float32, **save: Any
) -> torch.nn.Module:
    """A model of `shape`, saved in `folder` by transformers; `save` goes to `save_pretrained`."""
    model = build_model(transformers_config(shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0
            parameter.normal_(around, 0.1 if parameter.ndim == 1 else 0.05, generator=generator)
    model.to(dtype).save_pretrained(folder, **save)
    return model
