"""Checkpoints that hold weights alone, in the same format and under the same manifest as those of a run.

Several processes write one together: each its blocks, one of them the manifest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.directory import check_sizes, folder_of, steps_in
from megabench.checkpoint.files import Named, TensorFiles, check_files, check_tensors, num_bytes, write_files
from megabench.checkpoint.manifest import MANIFEST_NAME, DamagedError, FileEntry, Manifest, ModelEntry
from megabench.checkpoint.shards import key, size
from megabench.models.mapping import Piece
from megabench.models.shape import ModelShape
from megabench.runtime import environment

_FILE_BYTES = 512 << 20


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

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a weight is stored."""
        return self.files.dtype("weight", name)

    def read(self, wanted: Piece, dtype: torch.dtype = torch.float32) -> Tensor:
        """A rectangle of a weight on CPU, [rows, columns] or [rows]; CheckpointError unless all of it is there."""
        values = torch.empty(size(wanted), dtype=dtype)
        try:
            self.files.read("weight", wanted, into=values)
        except DamagedError as error:
            raise CheckpointError(f"{self.folder} cannot be loaded: {error}") from None
        return values


def write_weights(folder: Path, stem: str, blocks: Iterable[tuple[Piece, Tensor]]) -> list[FileEntry]:
    """Writes blocks of weights into files of `folder` whose names begin with `stem`, and holds few of them at a time.

    Raises OSError where that fails.
    """
    files: list[FileEntry] = []
    for number, group in enumerate(_groups(blocks)):
        files += write_files(folder, f"{stem}-{number:05d}", group)
    return files


def _groups(blocks: Iterable[tuple[Piece, Tensor]]) -> Iterator[list[Named]]:
    """The blocks, named as in files, in groups of about a file."""
    group: list[Named] = []
    filled = 0
    for piece, block in blocks:
        group.append((key("weight", piece), block))
        filled += num_bytes(block)
        if filled >= _FILE_BYTES:
            yield group
            group, filled = [], 0
    if group:
        yield group


def weights_manifest(shape: ModelShape, files: Iterable[FileEntry]) -> Manifest:
    """The manifest of a checkpoint that holds the weights of a model of `shape`, and no more."""
    return Manifest(
        model=ModelEntry.of(shape),
        training=None,
        num_elements={"weight": shape.num_parameters},
        versions=environment.collect().versions,
        files=tuple(files),
    )


def open_weights(folder: Path, rank: int = 0, world_size: int = 1) -> Weights:
    """The weights of a checkpoint, of its folder or of a run's directory (the newest then), checked file by file.

    Each of several ranks checks the content of a part of the files.

    CheckpointError where there is none, or where it is damaged.
    """
    if not (folder / MANIFEST_NAME).exists() and (steps := steps_in(folder)):
        folder = folder_of(folder, steps[0])
    if not (folder / MANIFEST_NAME).exists():
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST_NAME}; give a folder that has one")
    try:
        manifest = Manifest.read(folder)
        check_sizes(folder, manifest)
        mine = manifest.files[rank::world_size]
        check_files(folder, mine)
        check_tensors(folder, mine, is_training_state=manifest.training is not None)
        return Weights(folder, manifest, TensorFiles(folder, manifest.files))
    except DamagedError as error:
        raise CheckpointError(f"{folder} is damaged: {error}; use another checkpoint") from None
