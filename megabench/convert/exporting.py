"""Export of a checkpoint to a Hugging Face model directory, which transformers can load."""

import json
import shutil
import time
from pathlib import Path

import torch
from torch import Tensor

from megabench.checkpoint.assets import listed_assets
from megabench.checkpoint.weights_only import CheckpointWeights
from megabench.convert import ConvertError
from megabench.convert.importing import Converted, check_equal, partial_of, same_bits
from megabench.convert.proof import Compare
from megabench.convert.verifying import Advance
from megabench.models.find import ASSETS
from megabench.models.hugging_face import CONFIG_NAME, read_config
from megabench.models.mapping import Piece, stored_shapes, whole_piece
from megabench.models.model_directory import HuggingFaceWeights
from megabench.models.shape import ModelShape
from megabench.models.write_directory import SHARD_BYTES, write_weights
from megabench.runtime.device import DTYPES

_MOST_NOTES = 8
_DTYPE_FIELDS = ("torch_dtype", "dtype")  # the field of older versions of transformers, and of newer versions
_CONFIG_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def export_dtype(weights: CheckpointWeights) -> torch.dtype | None:
    """Return the dtype to which an export converts all weights, or None if each tensor keeps its dtype.

    The dtype is the training precision of the run, because its checkpoints contain fp32 master weights. The result is
    None for a checkpoint that contains only weights.
    """
    training = weights.manifest.training
    return DTYPES[training.config["precision"]] if training else None


class Rounded:
    """Weights converted to `dtype` on reading. If `dtype` is None, each weight keeps its stored dtype."""

    def __init__(self, weights: CheckpointWeights, dtype: torch.dtype | None) -> None:
        self._weights, self._dtype = weights, dtype

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or self._weights.dtype(name)

    def read(self, wanted: Piece) -> Tensor:
        return self._weights.read(wanted, self._weights.dtype(wanted.name)).to(self.dtype(wanted.name))


def export_model(
    weights: CheckpointWeights,
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
    sizes = stored_shapes(shape)
    began = time.perf_counter()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        notes = _copy_assets(weights.folder, partial)
        _say_dtype(partial, {rounded.dtype(name) for name in sizes})
        write_weights(rounded, partial, shape, shard_bytes, advance)
        written = time.perf_counter()
        exported = HuggingFaceWeights(partial)
        for name, size in sizes.items():
            whole = whole_piece(name, size)
            if not same_bits(exported.read(whole), rounded.read(whole)):
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
        notes=tuple(notes),
    )


def _copy_assets(checkpoint: Path, out: Path) -> list[str]:
    """Copy the model files that the manifest lists to the new directory `out`, and return notes for the user.

    Raises:
        CheckpointError: The model files of the checkpoint are damaged.
        ConvertError: The checkpoint has no config.json.
    """
    assets = listed_assets(checkpoint)
    if CONFIG_NAME not in assets:
        raise ConvertError(
            f"the manifest of {checkpoint} lists no {ASSETS}/{CONFIG_NAME}. Export a checkpoint that megabench wrote."
        )
    for name, content in assets.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    beside = (path.relative_to(checkpoint / ASSETS).as_posix() for path in sorted((checkpoint / ASSETS).rglob("*")))
    unlisted = [f"{name!a}" for name in beside if not (out / name).exists()]
    notes = [f"not copied, because the manifest does not list it: {name}" for name in unlisted[:_MOST_NOTES]]
    config = read_config(out)
    if "rope_parameters" in config and "rope_theta" not in config:
        notes.append(
            f"{CONFIG_NAME} was copied from the model directory. It has rope_parameters without rope_theta: "
            f"transformers 4 would use its default rotary embedding. Load the export with transformers 5"
        )
    return notes


def _say_dtype(folder: Path, dtypes: set[torch.dtype]) -> None:
    """Write the dtype of the weights to config.json if all weights have one dtype and config.json names another."""
    content = read_config(folder)
    fields = [field for field in _DTYPE_FIELDS if field in content] or _DTYPE_FIELDS
    name = _CONFIG_NAMES[next(iter(dtypes))]
    if len(dtypes) == 1 and any(content.get(field) != name for field in fields):
        text = json.dumps(content | dict.fromkeys(fields, name), indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
