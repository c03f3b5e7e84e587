"""A directory as Hugging Face models are kept in: config.json, safetensors files, tokenizer files."""

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
GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_OUTPUT = "lm_head.weight"
# older files hold buffers that transformers now computes
_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
_COMPARED_ROWS = 4096


class ModelFilesError(UserError):
    """Model files that are not whole, or not those of the configuration beside them."""


class HuggingFaceWeights:
    """The weights in a Hugging Face directory, read where they lie; see `megabench.models.weights.Weights`.

    All names, shapes and dtypes are checked at once, from the files' headers; ModelFilesError names the first tensor
    that is missing, unknown, of another shape or of a dtype that is no floating-point one.
    """

    def __init__(self, folder: Path, shape: ModelShape | None = None) -> None:
        self.folder = folder
        self.shape = shape or read_shape(folder)
        self._files = {name: self._open(name) for name in self._file_names()}
        self._where = {tensor: file for name, file in self._files.items() for tensor in self._checked_keys(name, file)}
        self.sizes: Shapes = hugging_face_shapes(self.shape)
        self._check()

    def read(self, wanted: Piece) -> Tensor:
        """A block in the dtype of its file."""
        part = self._where[wanted.name].get_slice(wanted.name)
        rows, columns = slice(*wanted.rows), wanted.columns
        block: Tensor = part[rows] if columns is None else part[rows, slice(*columns)]
        return block

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._where[name].get_slice(name).get_dtype()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(torch.Size(size).numel() * self.dtype(name).itemsize for name, size in self.sizes.items())

    def _file_names(self) -> list[str]:
        if (self.folder / INDEX).exists():
            return sorted(set(self._index().values()))
        if (self.folder / ONE_FILE).exists():
            return [ONE_FILE]
        pickled = next(iter(sorted(self.folder.glob("*.bin"))), None)
        other = (
            f" (it has {pickled.name}, which megabench does not unpickle: save it with safetensors)" if pickled else ""
        )
        raise ModelFilesError(f"{self.folder} has neither {ONE_FILE} nor {INDEX}{other}")

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            return {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelFilesError(f"{path} is not whole: it has no readable weight_map; fetch it again") from None

    def _open(self, name: str) -> Any:
        path = self.folder / name
        try:
            return safe_open(str(path), framework="pt", device="cpu")
        except FileNotFoundError:
            raise ModelFilesError(f"{path} is missing, and {INDEX} names it; fetch it again") from None
        except (OSError, SafetensorError) as error:
            raise ModelFilesError(f"{path} is not a whole safetensors file ({error}); fetch it again") from None

    def _checked_keys(self, name: str, file: Any) -> list[str]:
        """The tensors of a file; with an index, each must be listed there, and in this file."""
        keys: list[str] = list(file.keys())
        if name == ONE_FILE and not (self.folder / INDEX).exists():
            return keys
        index = self._index()
        for tensor in keys:
            if index.get(tensor) != name:
                said = f"names {index[tensor]} for it" if tensor in index else "does not list it"
                raise ModelFilesError(
                    f"{self.folder / name} holds {tensor}, and {INDEX} {said}; correct the index, or fetch it again"
                )
        for tensor, where in index.items():
            if where == name and tensor not in keys:
                raise ModelFilesError(f"{INDEX} says that {name} holds {tensor}, and it does not; fetch {name} again")
        return keys

    def _check(self) -> None:
        for name, size in self.sizes.items():
            if name not in self._where:
                raise ModelFilesError(f"{self.folder} lacks the tensor {name}, which its {CONFIG_NAME} calls for")
            part = self._where[name].get_slice(name)
            if tuple(part.get_shape()) != size:
                raise ModelFilesError(
                    f"{self.folder}: {name} is {list(part.get_shape())}, and its {CONFIG_NAME} calls for {list(size)}"
                )
            if part.get_dtype() not in _DTYPES:
                raise ModelFilesError(
                    f"{self.folder}: {name} has dtype {part.get_dtype()}; weights must be {', '.join(_DTYPES)}"
                )
        for name in self._where:
            if name in self.sizes or name.endswith(_BUFFERS):
                continue
            if name == _OUTPUT and self.shape.tied_embeddings:
                self._check_tied()
            else:
                raise ModelFilesError(f"{self.folder} holds {name}, which its {CONFIG_NAME} does not call for")

    def _check_tied(self) -> None:
        """Some files hold the output layer although it is the embedding; then both must be the same."""
        embedding = self.shape.table.embedding
        one, other = (self._where[name].get_slice(name) for name in (embedding, _OUTPUT))
        same = one.get_shape() == other.get_shape()
        for row in range(0, self.shape.vocab_size if same else 0, _COMPARED_ROWS):
            same = same and torch.equal(one[row : row + _COMPARED_ROWS], other[row : row + _COMPARED_ROWS])
        if not same:
            raise ModelFilesError(
                f"{self.folder}: {_OUTPUT} differs from {embedding}, and its {CONFIG_NAME} says that they are tied"
            )


def read_assets(folder: Path) -> dict[str, bytes]:
    """The files beside the weights that a model needs: its configuration, its generation settings, its tokenizer."""
    return _read(folder, (CONFIG_NAME, GENERATION_CONFIG)) | read_tokenizer(folder)


def read_tokenizer(folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer, by name; none where there is no tokenizer."""
    return _read(folder, _TOKENIZER_FILES)


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
