"""Checkpoints that hold weights alone, in the same format and under the same manifest as those of a run.

save_weights(Path("checkpoints/llama"), get_model("llama-tiny"), tensors)     # tensors by Hugging Face name
checkpoint = open_weights(Path("checkpoints/llama"))                          # or a checkpoint of a run
checkpoint.manifest.model.name, checkpoint.read("model.norm.weight")
"""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.blocks import key, num_elements, size, whole
from megabench.checkpoint.directory import check_sizes, commit, folder_of, steps_in
from megabench.checkpoint.files import PART_BYTES, Named, TensorFiles, check_files, num_bytes, write_files
from megabench.checkpoint.manifest import MANIFEST_NAME, DamagedError, FileEntry, Manifest, ModelEntry
from megabench.models.mapping import Piece
from megabench.models.shape import ModelShape
from megabench.runtime import environment


@dataclass(frozen=True)
class Weights:
    """A checkpoint whose weights can be read, tensor by tensor."""

    folder: Path
    manifest: Manifest
    files: TensorFiles

    @property
    def names(self) -> list[str]:
        """The Hugging Face names of the weights."""
        return sorted(name for kind, name in self.files.names if kind == "weight")

    def read(self, wanted: Piece, dtype: torch.dtype = torch.float32) -> Tensor:
        """A rectangle of a weight on CPU, [rows, columns] or [rows]; CheckpointError unless all of it is there."""
        values = torch.empty(size(wanted), dtype=dtype)
        try:
            self.files.read("weight", wanted, into=values)
        except DamagedError as error:
            raise CheckpointError(f"{self.folder} cannot be loaded: {error}") from None
        return values


def save_weights(folder: Path, shape: ModelShape, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """Writes whole weights, by Hugging Face name, into a new checkpoint `folder`; one process, a few GiB at a time.

    CheckpointError where `folder` exists or cannot be written; nothing is left behind then.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; give the path of a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    files: list[FileEntry] = []
    total = 0
    try:
        partial.mkdir(parents=True)
        for number, group in enumerate(_groups(tensors)):
            total += sum(tensor.numel() for _, tensor in group)
            files += write_files(partial, f"weights-{number:05d}", group)
        manifest = Manifest(
            model=ModelEntry.of(shape),
            training=None,
            num_elements={"weight": total},
            versions=environment.collect().versions,
            files=tuple(files),
        )
        manifest.write(partial)
        commit(partial, folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror}; give a path on a disk with room"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _groups(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[Named]]:
    """The tensors, named as in files, in groups that are written side by side."""
    group: list[Named] = []
    for name, tensor in tensors:
        (piece,) = whole(name, tuple(tensor.shape)).pieces
        assert num_elements(piece) == tensor.numel()
        group.append((key("weight", piece), tensor))
        if sum(num_bytes(member) for _, member in group) >= 2 * PART_BYTES:
            yield group
            group = []
    if group:
        yield group


def open_weights(folder: Path) -> Weights:
    """The weights of a checkpoint, of its folder or of a run's directory (the newest then), checked file by file.

    CheckpointError where there is none, or where it is damaged.
    """
    if not (folder / MANIFEST_NAME).exists() and (steps := steps_in(folder)):
        folder = folder_of(folder, steps[0])
    if not (folder / MANIFEST_NAME).exists():
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST_NAME}; give a folder that has one")
    try:
        manifest = Manifest.read(folder)
        check_sizes(folder, manifest)
        check_files(folder, manifest.files)
        return Weights(folder, manifest, TensorFiles(folder, manifest.files))
    except DamagedError as error:
        raise CheckpointError(f"{folder} is damaged: {error}; use another checkpoint") from None
