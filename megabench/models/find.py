"""What `--model` names: a shape of the catalogue, a Hugging Face directory, or a checkpoint.

Loads torch for the last two alone.
"""

import os
from functools import lru_cache
from pathlib import Path

from megabench import UserError
from megabench.models.catalog import CATALOG, UnknownModelError, get_model
from megabench.models.shape import ModelShape

# where a checkpoint keeps its model's configuration and tokenizer
ASSETS = "hugging_face"


class LayersError(UserError):
    """A number of layers for a model that has its own."""


def find_model(name: str, num_layers: int | None = None) -> ModelShape:
    """The shape of a catalogue name, cut or grown to `num_layers`, or of a directory.

    UnknownModelError where there is none, UnsupportedModelError where the directory's configuration is none that
    megabench computes, LayersError for a directory of other layers than it has.
    """
    if name in CATALOG or not (os.sep in name or Path(name).is_dir()):
        shape = get_model(name)
        return shape.with_layers(num_layers) if num_layers else shape
    if num_layers:
        raise LayersError(
            f"num_layers={num_layers} cuts models of the catalogue, and model={name} has weights of its own; leave it "
            f"out"
        )
    return _read(name)


def is_directory(name: str) -> bool:
    """Whether a model that `find_model` found has weights of its own."""
    return name not in CATALOG


@lru_cache(maxsize=16)
def _read(name: str) -> ModelShape:
    from dataclasses import replace

    from megabench.models.hugging_face import CONFIG_NAME, read_shape

    folder = Path(name)
    if not folder.is_dir():
        raise UnknownModelError(
            f"model={name} is no directory, and no name of the catalogue; known: {', '.join(CATALOG)}"
        )
    for candidate in (folder, folder / ASSETS):
        if (candidate / CONFIG_NAME).exists():
            return replace(read_shape(candidate), name=name)
    steps = sorted(folder.glob(f"*/{ASSETS}/{CONFIG_NAME}"))
    hint = (
        f"it holds checkpoints: give one of them, as {steps[-1].parent.parent}" if steps else "give a model's directory"
    )
    raise UnknownModelError(f"model={name} has no {CONFIG_NAME}; {hint}")
