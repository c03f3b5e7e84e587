"""Writing of weights into a Hugging Face model directory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from megabench.models.hugging_face import CONFIG_NAME
from megabench.models.mapping import Piece, stored_shapes, whole_piece
from megabench.models.model_directory import INDEX, names_in_files
from megabench.models.shape import ModelShape

SHARD_BYTES = 5_000_000_000  # the default of transformers


class RoundedWeights(Protocol):
    """Weights, each in the dtype in which it is written."""

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, wanted: Piece) -> Tensor: ...


def write_weights(
    weights: RoundedWeights,
    folder: Path,
    shape: ModelShape,
    shard_bytes: int = SHARD_BYTES,
    advance: Callable[[str], None] = lambda activity: None,
) -> None:
    """Write the tensors to files of at most about `shard_bytes` bytes. Write an index if there are several files.

    `folder` contains config.json. `advance` is told about each tensor.
    """
    sizes = stored_shapes(shape)
    in_model = {stored: name for name, stored in names_in_files(shape).items()}
    planned = split_torch_state_dict_into_shards(
        {
            stored: torch.empty(sizes[name], dtype=weights.dtype(name), device="meta")
            for stored, name in in_model.items()
        },
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in planned.filename_to_tensors.items():
        tensors = {}
        for stored in names:
            name = in_model[stored]
            tensors[stored] = weights.read(whole_piece(name, sizes[name])).view(sizes[name]).contiguous()
            advance(f"writing {name}")
        save_file(tensors, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG_NAME, folder / file)  # safetensors ignores the umask: only the owner could read
    if planned.is_sharded:
        index = {"metadata": planned.metadata, "weight_map": planned.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
