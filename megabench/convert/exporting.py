"""Export of a checkpoint to a Hugging Face model directory, which transformers can load."""

import json
import shutil
import time
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from megabench.checkpoint.shards import whole
from megabench.checkpoint.weights_only import Weights
from megabench.convert import ConvertError
from megabench.convert.importing import Converted, check_equal, partial_of, same_bits
from megabench.convert.proof import Compare
from megabench.convert.verifying import Advance
from megabench.models.find import ASSETS
from megabench.models.hugging_face import CONFIG_NAME, read_config
from megabench.models.mapping import Piece, Shapes, hugging_face_shapes
from megabench.models.model_directory import INDEX, HuggingFaceWeights
from megabench.models.shape import ModelShape
from megabench.runtime.device import DTYPES

SHARD_BYTES = 5_000_000_000  # the default of transformers
_CONFIG_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def export_dtype(weights: Weights) -> torch.dtype | None:
    """Return the dtype to which an export converts all weights, or None if each tensor keeps its dtype.

    The dtype is the training precision of the run, because its checkpoints contain fp32 master weights. The result is
    None for a checkpoint that contains only weights.
    """
    training = weights.manifest.training
    return DTYPES[training.config["precision"]] if training else None


class Rounded:
    """Weights converted to `dtype` on reading. If `dtype` is None, each weight keeps its stored dtype."""

    def __init__(self, weights: Weights, dtype: torch.dtype | None) -> None:
        self._weights, self._dtype = weights, dtype

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or self._weights.dtype(name)

    def read(self, wanted: Piece) -> Tensor:
        return self._weights.read(wanted, self._weights.dtype(wanted.name)).to(self.dtype(wanted.name))


def export_model(
    weights: Weights,
    out: Path,
    shape: ModelShape,
    dtype: torch.dtype | None,
    prove: Compare | None,
    advance: Advance,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Write the weights of a checkpoint to the Hugging Face directory `out`, and compare both models with `prove`.

    Each tensor is written in `dtype`, or in its stored dtype if `dtype` is None. The export runs in one process. The
    process keeps the tensors of one output file in memory at a time. After an error, `out` does not exist.

    Raises:
        ConvertError: The directory cannot be written, or its tensors differ from those of the checkpoint.
        UnequalError: The logits of the two models differ.
    """
    partial, rounded = partial_of(out), Rounded(weights, dtype)
    sizes = hugging_face_shapes(shape)
    began = time.perf_counter()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(weights.folder / ASSETS, partial)
        _say_dtype(partial, {rounded.dtype(name) for name in sizes})
        _write(rounded, partial, sizes, shard_bytes, advance)
        written = time.perf_counter()
        exported = HuggingFaceWeights(partial)
        for name, size in sizes.items():
            if not same_bits(exported.read(_whole(name, size)), rounded.read(_whole(name, size))):
                raise ConvertError(f"{name} in {out} differs from the tensor in {weights.folder}")
        comparison = prove(exported, rounded, advance) if prove else None
        check_equal(comparison, f"{out} was not written, because its logits would differ from {weights.folder}")
        partial.rename(out)
    except OSError as error:
        raise ConvertError(
            f"{out} cannot be written: {error.strerror}. Give a path on a disk with free space."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    files = list(out.glob("*.safetensors"))
    return Converted(
        folder=out,
        num_bytes=sum(file.stat().st_size for file in files),
        num_files=len(files),
        write_seconds=written - began,
        compare_seconds=time.perf_counter() - written,
        comparison=comparison,
    )


def _write(weights: Rounded, folder: Path, sizes: Shapes, shard_bytes: int, advance: Advance) -> None:
    """Write the tensors to files of at most about `shard_bytes` bytes. Write an index if there are several files."""
    planned = split_torch_state_dict_into_shards(
        {name: torch.empty(size, dtype=weights.dtype(name), device="meta") for name, size in sizes.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in planned.filename_to_tensors.items():
        tensors = {}
        for name in names:
            tensors[name] = weights.read(_whole(name, sizes[name])).contiguous()
            advance(f"writing {name}")
        save_file(tensors, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG_NAME, folder / file)  # safetensors ignores the umask: only the owner could read
    if planned.is_sharded:
        index = {"metadata": planned.metadata, "weight_map": planned.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _whole(name: str, size: tuple[int, ...]) -> Piece:
    return whole(name, size).pieces[0]


def _say_dtype(folder: Path, dtypes: set[torch.dtype]) -> None:
    """Write the dtype of the weights to config.json if all weights have one dtype and config.json names another."""
    content = read_config(folder)
    # older versions of transformers use torch_dtype, newer versions use dtype
    field = "torch_dtype" if "torch_dtype" in content else "dtype"
    name = _CONFIG_NAMES[next(iter(dtypes))]
    if len(dtypes) == 1 and content.get(field) != name:
        text = json.dumps(content | {field: name}, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
