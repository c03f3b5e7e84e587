"""Checkpoints that contain only weights, in the file format of training checkpoints.

Several processes write one checkpoint together: each process writes its own blocks, and one process writes the
manifest.
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
class CheckpointWeights:
    """A validated checkpoint from which weights can be read block by block."""

    folder: Path
    manifest: Manifest
    files: TensorFiles

    @property
    def names(self) -> list[str]:
        """The Hugging Face names of all weights, sorted."""
        return sorted(name for kind, name in self.files.names if kind == "weight")

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a weight is stored."""
        return self.files.dtype("weight", name)

    def read(self, wanted: Piece, dtype: torch.dtype = torch.float32) -> Tensor:
        """Read a rectangular block of a weight to the CPU, of shape [rows, columns] or [rows].

        Raises:
            CheckpointError: The checkpoint does not contain the whole block.
        """
        values = torch.empty(size(wanted), dtype=dtype)
        try:
            self.files.read("weight", wanted, into=values)
        except DamagedError as error:
            raise CheckpointError(f"{self.folder} cannot be loaded: {error}") from None
        return values


def write_weights(folder: Path, stem: str, blocks: Iterable[tuple[Piece, Tensor]]) -> list[FileEntry]:
    """Write blocks of weights to files in `folder` whose names start with `stem`, keeping few blocks in memory.

    Raises:
        OSError: A file cannot be written.
    """
    files: list[FileEntry] = []
    for number, group in enumerate(_groups(blocks)):
        files += write_files(folder, f"{stem}-{number:05d}", group)
    return files


def _groups(blocks: Iterable[tuple[Piece, Tensor]]) -> Iterator[list[Named]]:
    """Yield groups of named blocks. Each group has about _FILE_BYTES bytes and becomes one call of `write_files`."""
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
    """Create the manifest of a checkpoint that contains only the weights of a model of `shape`."""
    return Manifest(
        model=ModelEntry.of(shape),
        training=None,
        num_elements={"weight": shape.num_parameters},
        versions=environment.versions(),
        files=tuple(files),
    )


def open_weights(folder: Path, rank: int = 0, world_size: int = 1) -> CheckpointWeights:
    """Open the weights of a checkpoint after validating its files.

    `folder` is a checkpoint or a directory of checkpoints. From a directory, the function opens the newest checkpoint.
    With several ranks, each rank checks the contents of some of the files.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged.
    """
    if not (folder / MANIFEST_NAME).exists() and (steps := steps_in(folder)):
        folder = folder_of(folder, steps[0])
    if not (folder / MANIFEST_NAME).exists():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST_NAME}. Give a checkpoint directory.")
    try:
        manifest = Manifest.read(folder)
        check_sizes(folder, manifest)
        mine = manifest.files[rank::world_size]
        check_files(folder, mine)
        check_tensors(folder, mine, is_training_state=manifest.training is not None)
        return CheckpointWeights(folder, manifest, TensorFiles(folder, manifest.files))
    except DamagedError as error:
        raise CheckpointError(f"{folder} is damaged: {error}. Use another checkpoint.") from None
