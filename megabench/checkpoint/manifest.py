"""The manifest of a checkpoint: its contents, and the size and checksum of every file.

This module does not import torch. The manifest is written atomically, after all other files. A checkpoint is
valid only if its files match its manifest.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megabench.checkpoint import CheckpointError
from megabench.inputs import read_json
from megabench.models.assets import ASSET_NAME
from megabench.models.find import ASSETS
from megabench.models.shape import ModelShape
from megabench.record import Rollback, TokenizerUsed

SCHEMA_VERSION = 2  # of manifests; CONTRIBUTING.md says when it changes
MANIFEST_NAME = "manifest.json"
_LARGEST_MANIFEST = 2**26

# fields of ModelShape that may differ between two runs of one model
_RUN_DEFAULTS = (
    "name",
    "foreign",
    "num_positions",
    "seq_length",
    "micro_batch",
    "global_batch",
    "learning_rate",
    "lr_warmup",
    "source",
)


class DamagedError(Exception):
    """Raised if a checkpoint does not match its manifest. The search for a valid checkpoint skips damaged ones."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Part):
    """A file of the checkpoint: its path below the checkpoint's folder, its size, and the CRC-32 of its bytes."""

    # never leaves the folder
    name: str = Field(pattern=rf"^({ASSETS}/{ASSET_NAME}|[A-Za-z0-9_][A-Za-z0-9_.-]*)$", max_length=200)
    num_bytes: int = Field(ge=0, le=2**50)
    crc32: int


class ModelEntry(_Part):
    """The model of a checkpoint. `shape` has all fields that determine the weight shapes and the computation."""

    name: str
    shape: dict[str, Any]

    @classmethod
    def of(cls, shape: ModelShape) -> "ModelEntry":
        fields = {name: value for name, value in asdict(shape).items() if name not in _RUN_DEFAULTS}
        # convert tuples to lists, as reading the JSON file would return
        return cls(name=shape.name, shape=json.loads(json.dumps(fields)))

    def difference(self, run: "ModelEntry") -> str | None:
        """Return how the model `run` of a run differs from this model, or None if both models are equal.

        In a result such as "num_layers 8 there, 4 here", "there" is the checkpoint and "here" is the run.
        """
        fields = sorted(self.shape.keys() | run.shape.keys())
        unequal = [field for field in fields if self.shape.get(field) != run.shape.get(field)]
        return ", ".join(f"{f} {self.shape.get(f)} there, {run.shape.get(f)} here" for f in unequal) or None


class OptimizerEntry(_Part):
    """The optimizer state besides tensors. `step` is the number of updates, and `loss_scale` is used with fp16 only."""

    name: str
    step: int = Field(ge=0, le=10**9)
    loss_scale: dict[str, float] | None = None


class DataEntry(_Part):
    """The position in the training data. `next_sequence` is the index of the first sequence not yet trained on."""

    name: str
    sha256: str
    next_sequence: int = Field(ge=0, lt=2**63)
    tokenizer: TokenizerUsed | None = None


class TrainingEntry(_Part):
    """The state that a resumed run needs. `step` is the number of completed steps.

    `config` is the resolved configuration of the run that wrote the checkpoint. `run_id` identifies the run across
    restarts. `rollbacks` are the rollbacks before the save, and `recent_losses` the last losses, from which loss spikes
    are detected.
    """

    run_id: str
    step: int = Field(ge=0, le=10**9)
    engine: str
    layout: dict[str, int]
    world_size: int
    optimizer: OptimizerEntry
    data: DataEntry
    config: dict[str, Any]
    rollbacks: tuple[Rollback, ...] = ()
    recent_losses: tuple[float, ...] = ()


class Manifest(_Part):
    """The contents of a manifest file. `training` is None for a checkpoint that contains only weights."""

    schema_version: int = SCHEMA_VERSION
    model: ModelEntry
    training: TrainingEntry | None
    num_elements: dict[str, int]
    versions: dict[str, str]
    files: tuple[FileEntry, ...]

    def write(self, folder: Path) -> None:
        """Write MANIFEST_NAME to `folder` atomically, and flush the file to disk."""
        body = self.model_dump(mode="json")
        partial = folder / f".{MANIFEST_NAME}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"crc32": _checksum(body), "manifest": body}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / MANIFEST_NAME)
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and validate the manifest of a checkpoint.

        Raises:
            DamagedError: The manifest is missing, damaged or incomplete.
            CheckpointError: The manifest has another schema version.
        """
        try:
            content = read_json(folder / MANIFEST_NAME, _LARGEST_MANIFEST)
            body = content["manifest"]
            if content["crc32"] != _checksum(body):
                raise DamagedError(f"{MANIFEST_NAME} does not match its own checksum")
        except OSError as error:
            raise DamagedError(f"{MANIFEST_NAME} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise DamagedError(f"{MANIFEST_NAME} is not a complete JSON manifest") from None
        if not isinstance(body, dict):
            raise DamagedError(f"{MANIFEST_NAME} is not a complete JSON manifest")
        if (schema := body.get("schema_version")) != SCHEMA_VERSION:
            raise CheckpointError(
                f"{folder} has checkpoint schema {schema}, and this megabench reads schema {SCHEMA_VERSION}. "
                f"Use the megabench that wrote it ({body.get('versions', {}).get('megabench', 'version unknown')})."
            )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise DamagedError(f"{MANIFEST_NAME} has a missing or invalid field: {error.errors()[0]['loc']}") from None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
