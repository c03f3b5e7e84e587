"""The weights of a Hugging Face model directory."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megabench import UserError
from megabench.models.hugging_face import CONFIG_NAME, read_shape
from megabench.models.mapping import Piece, Shapes, hugging_face_shapes
from megabench.models.shape import ModelShape

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_OUTPUT = "lm_head.weight"
# Older files contain buffers that transformers now computes.
_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
_COMPARED_ROWS = 4096


class ModelFilesError(UserError):
    """Raised if model files are incomplete, or do not match the config.json of their directory."""


class HuggingFaceWeights:
    """The weights in a Hugging Face directory, read on demand; implements `megabench.models.weights.Weights`.

    The constructor checks the names, shapes and dtypes of all tensors in the headers of the files. ModelFilesError
    names the first tensor that is missing or unknown, or that has a wrong shape or dtype.
    """

    def __init__(self, folder: Path, shape: ModelShape | None = None) -> None:
        self.folder = folder
        self.shape = shape or read_shape(folder)
        self._files = {name: self._open(name) for name in self._file_names()}
        self._where = {tensor: file for name, file in self._files.items() for tensor in self._checked_keys(name, file)}
        self.sizes: Shapes = hugging_face_shapes(self.shape)
        self._check()

    def read(self, wanted: Piece) -> Tensor:
        """Return a block of a tensor in the dtype of its file."""
        part = self._where[wanted.name].get_slice(wanted.name)
        rows, columns = slice(*wanted.rows), wanted.columns
        block: Tensor = part[rows] if columns is None else part[rows, slice(*columns)]
        return block

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._where[name].get_slice(name).get_dtype()]

    @property
    def num_bytes(self) -> int:
        """The total size of all parameters in bytes. Tied parameters count once."""
        return sum(torch.Size(size).numel() * self.dtype(name).itemsize for name, size in self.sizes.items())

    def _file_names(self) -> list[str]:
        if (self.folder / INDEX).exists():
            return sorted(set(self._index().values()))
        if (self.folder / ONE_FILE).exists():
            return [ONE_FILE]
        pickled = next(iter(sorted(self.folder.glob("*.bin"))), None)
        other = (
            f"megabench does not unpickle {pickled.name}: convert {pickled.name} to safetensors."
            if pickled
            else "Give a directory with safetensors weights."
        )
        raise ModelFilesError(f"{self.folder} has neither {ONE_FILE} nor {INDEX}. {other}")

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            return {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelFilesError(f"{path} has no readable weight_map. Download {path} again.") from None

    def _open(self, name: str) -> Any:
        path = self.folder / name
        try:
            return safe_open(str(path), framework="pt", device="cpu")
        except FileNotFoundError:
            raise ModelFilesError(f"{path} is missing, but {INDEX} lists {name}. Download {name} again.") from None
        except (OSError, SafetensorError) as error:
            raise ModelFilesError(
                f"{path} is not a complete safetensors file ({error}). Download {name} again."
            ) from None

    def _checked_keys(self, name: str, file: Any) -> list[str]:
        """Return the tensor names of a file. Raise ModelFilesError if the index disagrees with the file."""
        keys: list[str] = list(file.keys())
        if name == ONE_FILE and not (self.folder / INDEX).exists():
            return keys
        index = self._index()
        for tensor in keys:
            if index.get(tensor) != name:
                said = f"lists it in {index[tensor]}" if tensor in index else "does not list it"
                raise ModelFilesError(
                    f"{self.folder / name} contains {tensor}, but {INDEX} {said}. Correct or re-download {INDEX}."
                )
        for tensor, where in index.items():
            if where == name and tensor not in keys:
                raise ModelFilesError(
                    f"{INDEX} lists {tensor} in {name}, but {name} does not contain {tensor}. Download {name} again."
                )
        return keys

    def _check(self) -> None:
        for name, size in self.sizes.items():
            if name not in self._where:
                raise ModelFilesError(
                    f"{self.folder} lacks the tensor {name}, which {CONFIG_NAME} requires. "
                    f"Use the {CONFIG_NAME} of the weights."
                )
            part = self._where[name].get_slice(name)
            if tuple(part.get_shape()) != size:
                raise ModelFilesError(
                    f"{self.folder}: {name} has shape {list(part.get_shape())}, but {CONFIG_NAME} requires "
                    f"{list(size)}. Use the {CONFIG_NAME} of the weights."
                )
            if part.get_dtype() not in _DTYPES:
                raise ModelFilesError(
                    f"{self.folder}: {name} has dtype {part.get_dtype()}. "
                    f"Convert the weights to {' or '.join(_DTYPES)}."
                )
        for name in self._where:
            if name in self.sizes or name.endswith(_BUFFERS):
                continue
            if name == _OUTPUT and self.shape.tied_embeddings:
                self._check_tied()
            else:
                raise ModelFilesError(
                    f"{self.folder} contains the tensor {name}, which a model with this {CONFIG_NAME} does not have. "
                    f"Use the {CONFIG_NAME} of the weights."
                )

    def _check_tied(self) -> None:
        """Check that an output layer that a tied model stores separately is equal to the embedding."""
        embedding = self.shape.table.embedding
        one, other = (self._where[name].get_slice(name) for name in (embedding, _OUTPUT))
        same = one.get_shape() == other.get_shape()
        for row in range(0, self.shape.vocab_size if same else 0, _COMPARED_ROWS):
            same = same and torch.equal(one[row : row + _COMPARED_ROWS], other[row : row + _COMPARED_ROWS])
        if not same:
            raise ModelFilesError(
                f"{self.folder}: {_OUTPUT} differs from {embedding}, but {CONFIG_NAME} ties both tensors. "
                f"Use the {CONFIG_NAME} of the weights."
            )
