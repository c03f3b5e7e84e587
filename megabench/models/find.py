"""Lookup of a `--model` value: a name of the catalogue, a Hugging Face directory, or a checkpoint.

Loads torch only for a Hugging Face directory or a checkpoint.
"""

import os
from functools import lru_cache
from pathlib import Path

from megabench.errors import UserError
from megabench.models.catalog import CATALOG, UnknownModelError, get_model, unknown_model
from megabench.models.shape import ModelShape

# the folder inside a checkpoint that contains the model's configuration and tokenizer
ASSETS = "hugging_face"


class LayersError(UserError):
    """Raised if `num_layers` is set for a model directory, whose number of layers is fixed."""


def find_model(name: str, num_layers: int | None = None) -> ModelShape:
    """Return the shape of a model that is given by its catalogue name or by its directory.

    `num_layers` replaces the number of layers of a catalogue model. Raise UnknownModelError for an unknown model,
    UnsupportedModelError for a configuration that megabench cannot train, and LayersError for a directory with
    `num_layers`.
    """
    if name in CATALOG or not (os.sep in name or Path(name).is_dir()):
        shape = get_model(name)
        return shape.with_layers(num_layers) if num_layers else shape
    if num_layers:
        raise LayersError(
            f"num_layers={num_layers} applies only to models of the catalogue, but model={name} is a directory with a "
            f"fixed number of layers. Remove num_layers."
        )
    return _read(name)


def is_directory(name: str) -> bool:
    """Return whether a model that `find_model` accepted is a directory with weights, not a name of the catalogue."""
    return name not in CATALOG


@lru_cache(maxsize=16)
def _read(name: str) -> ModelShape:
    from dataclasses import replace

    from megabench.models.hugging_face import CONFIG_NAME, read_shape

    folder = Path(name)
    if not folder.is_dir():
        raise unknown_model(name)
    for candidate in (folder, folder / ASSETS):
        if (candidate / CONFIG_NAME).exists():
            return replace(read_shape(candidate), name=name)
    steps = sorted(folder.glob(f"*/{ASSETS}/{CONFIG_NAME}"))
    hint = (
        f"The directory contains checkpoints. Give one of the checkpoints, for example {steps[-1].parent.parent}."
        if steps
        else "Give the directory of a model."
    )
    raise UnknownModelError(f"model={name} has no {CONFIG_NAME}. {hint}")
