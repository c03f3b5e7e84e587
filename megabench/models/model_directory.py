"""The weights of a Hugging Face model directory."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megabench.errors import UserError
from megabench.inputs import LARGE, check_regular, read_json
from megabench.models.causal_lm import (
    CONFIG_NAME,
    UnsupportedModelError,
    build_model,
    is_ignored,
    names_in_model,
    stored_names,
)
from megabench.models.hugging_face import read_shape, transformers_config
from megabench.models.mapping import Piece, Shapes, stored_shapes
from megabench.models.shape import ModelShape

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DDP and torch.compile add to tensor names
_COMPARED_ROWS = 4096


class ModelFilesError(UserError):
    """Raised if model files are incomplete, or do not match the config.json of their directory."""


class HuggingFaceWeights:
    """The weights in a Hugging Face directory, read on demand; implements `megabench.models.weights.Weights`.

    `sizes` has the shapes of all parameters and persistent buffers by their names in the model. The constructor checks
    the names, shapes and dtypes of all tensors in the headers of the files. ModelFilesError names the first tensor that
    is missing or unknown, or that has a wrong shape or dtype.
    """

    def __init__(self, folder: Path, shape: ModelShape | None = None) -> None:
        self.folder = folder
        self.shape = shape or read_shape(folder)
        self._files = {name: self._open(name) for name in self._file_names()}
        self._where = {tensor: file for name, file in self._files.items() for tensor in self._checked_keys(name, file)}
        self.sizes: Shapes = stored_shapes(self.shape)
        self._stored_names = self._find_names()
        self._check()

    def read(self, wanted: Piece) -> Tensor:
        """Return a block of a tensor in the dtype of its file."""
        part = self._part(wanted.name)
        rows, columns = slice(*wanted.rows), slice(*wanted.columns) if wanted.columns else slice(None)
        num_dims = len(part.get_shape())
        if num_dims == 2:
            block: Tensor = part[rows, columns]
        elif num_dims == 0:
            block = part[...].flatten()
        else:
            block = part[rows] if wanted.columns is None else part[rows].flatten(1)[:, columns]
        return block

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._part(name).get_dtype()]

    def _part(self, name: str) -> Any:
        """Return the stored tensor, not yet read, of a tensor of the model."""
        stored = self._stored_names[name]
        return self._where[stored].get_slice(stored)

    @property
    def num_bytes(self) -> int:
        """The total size of all parameters in bytes. Tied parameters count once."""
        return sum(torch.Size(size).numel() * self.dtype(name).itemsize for name, size in self.sizes.items())

    def _file_names(self) -> list[str]:
        has_one, has_index = (self.folder / ONE_FILE).exists(), (self.folder / INDEX).exists()
        if has_index:
            names = sorted(set(self._index().values()))
            if has_one and ONE_FILE not in names:
                raise ModelFilesError(
                    f"{self.folder} has both {ONE_FILE} and {INDEX}, which lists other files, and transformers reads "
                    f"only {ONE_FILE}. Remove the file that does not belong to the model."
                )
            return names
        if has_one:
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
            weight_map = read_json(path, LARGE)["weight_map"]
            index = {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelFilesError(f"{path} has no readable weight_map. Download {path} again.") from None
        if outside := next((file for file in index.values() if Path(file).name != file), None):
            raise ModelFilesError(
                f"{path} lists {outside!r}, which is not the name of a file beside it. Correct {path}."
            )
        return index

    def _open(self, name: str) -> Any:
        path = self.folder / name
        try:
            check_regular(path)
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

    def _find_names(self) -> dict[str, str]:
        """Return the stored name of every tensor of the model. transformers renames some tensors on loading.

        Raise ModelFilesError for a tensor that does not belong to the model.
        """
        if not self.shape.foreign and self._where.keys() == self.sizes.keys():
            return {name: name for name in self.sizes}
        with torch.device("meta"):
            model = build_model(transformers_config(self.shape))
        try:
            in_model = names_in_model(model, self._where)
        except UnsupportedModelError as error:
            raise ModelFilesError(f"{self.folder}: {error}.") from None
        first: dict[int, str] = {}  # the name in `sizes` of each parameter, which may have other names too
        tied = {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}
        found: dict[str, list[str]] = {}
        for stored, name in in_model.items():
            if (name := tied.get(name, name)) in self.sizes:
                found.setdefault(name, []).append(stored)
            elif not is_ignored(model, name):
                raise ModelFilesError(f"{self.folder} contains the tensor {stored}, {self._why_unknown()}")
        for several in found.values():
            self._check_equal(*several)
        return {name: several[0] for name, several in found.items()}

    def _why_unknown(self) -> str:
        for prefix in _WRAPPERS:
            if all(name.startswith(prefix) for name in self._where):
                return (
                    f"and all names begin with {prefix!r}, the prefix of a wrapper. Save the model inside the wrapper "
                    f"again."
                )
        return f"which a model with this {CONFIG_NAME} does not have. Use the {CONFIG_NAME} of the weights."

    def _check(self) -> None:
        for name, size in self.sizes.items():
            if name not in self._stored_names:
                raise ModelFilesError(
                    f"{self.folder} lacks the tensor {name}, which {CONFIG_NAME} requires. "
                    f"Use the {CONFIG_NAME} of the weights."
                )
            part = self._part(name)
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

    def _check_equal(self, first: str, *others: str) -> None:
        """Check that the stored tensors of one tied parameter, such as embedding and output layer, are equal."""
        one = self._where[first].get_slice(first)
        for name in others:
            other = self._where[name].get_slice(name)
            same = one.get_shape() == other.get_shape()
            for row in range(0, one.get_shape()[0] if same else 0, _COMPARED_ROWS):
                same = same and torch.equal(one[row : row + _COMPARED_ROWS], other[row : row + _COMPARED_ROWS])
            if not same:
                raise ModelFilesError(
                    f"{self.folder}: {name} differs from {first}, but {CONFIG_NAME} ties both tensors. "
                    f"Use the {CONFIG_NAME} of the weights."
                )


def names_in_files(shape: ModelShape) -> dict[str, str]:
    """Return the names under which transformers stores the tensors of a model, by their names in the model."""
    names = stored_shapes(shape).keys()
    if not shape.foreign:
        return {name: name for name in names}
    with torch.device("meta"):
        model = build_model(transformers_config(shape))
    return stored_names(model, names)
