"""Checkpoint directories: naming, validation and deletion of checkpoints. This module does not import torch.

.run-id                                     the run id and the launch id of the run that saves to this directory
.rollbacks.json                             the rollbacks of the run (train/resume.py)
step-00000006/                              a complete checkpoint: tensor files and a manifest
.step-00000012.9a31c2-1f0c-6.partial/       an incomplete checkpoint of run 9a31c2: a save in progress or interrupted
.step-00000003.9a31c2-77e0.partial.old/     a checkpoint that run 9a31c2 is deleting
step-00000012.damaged/                      a damaged checkpoint, renamed by a run that resumed from an older one
step-00000012.unhealthy/                    a checkpoint newer than the one that a run has rolled back to

A run deletes only checkpoints that it created. The run id is part of the checkpoint's manifest and of the name of an
incomplete checkpoint. Deletion never follows symbolic links.
"""

import re
import secrets
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal

from megabench.atomic_write import write_atomically
from megabench.checkpoint import CheckpointError
from megabench.checkpoint.manifest import MANIFEST_NAME, DamagedError, Manifest, sync_folder
from megabench.inputs import read_text

RUN_ID_NAME = ".run-id"
_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-\d{8,}\.(?P<run_id>[0-9a-f]+)(-[0-9a-f]+)*\.partial(\.old)?")


def claim_run_id(directory: Path, launch_id: str, continues: bool) -> str:
    """Write the run id and the launch id to `directory`, and return the run id.

    A resumed run (`continues`) keeps the run id in the directory. Any other run gets a new run id.

    Raises:
        CheckpointError: The directory is not writable.
    """
    owner = _owner(directory) if continues else None
    run_id = owner[0] if owner else secrets.token_hex(6)
    path = directory / RUN_ID_NAME
    try:
        write_atomically(path, f"{run_id}\n{launch_id}\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}. Save to another directory.") from None
    return run_id


def is_launched_by(directory: Path, launch_id: str) -> bool:
    """Return whether the run that last claimed `directory` has this launch id."""
    owner = _owner(directory)
    return owner is not None and owner[1] == launch_id


def _owner(directory: Path) -> tuple[str, str] | None:
    """Return the run id and the launch id that `directory` records, or None if its .run-id file cannot be read."""
    try:
        run_id, launch_id = read_text(directory / RUN_ID_NAME).splitlines()
    except (OSError, ValueError):
        return None
    return (run_id, launch_id) if re.fullmatch("[0-9a-f]{12}", run_id) else None


def new_token(run_id: str) -> str:
    """Return a token that makes the names of a run's partial directories unique to one start of the run."""
    return f"{run_id}-{secrets.token_hex(4)}"


def run_id_of(token: str) -> str:
    return token.partition("-")[0]


def folder_of(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint that is saved after `step` steps."""
    return directory / f"step-{step:08d}"


def partial_folder(directory: Path, step: int, token: str) -> Path:
    """Return the directory that a checkpoint is written to until it is complete. `token` is unique to the save."""
    return directory / f".{folder_of(directory, step).name}.{token}.partial"


def bytes_in(folder: Path) -> int:
    """Return the total size of the files in a directory in bytes.

    Other processes may add or remove files during the call.
    """
    size = 0
    with suppress(OSError):
        for entry in folder.iterdir():
            size += entry.stat().st_size
    return size


def steps_in(directory: Path) -> list[int]:
    """Return the steps of all checkpoints in a directory, newest first, without validating the checkpoints."""
    if not directory.is_dir():
        return []
    found = (_COMPLETE.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
    return sorted((int(name[1]) for name in found if name), reverse=True)


def is_checkpoint(folder: Path) -> bool:
    """Return whether the directory has the name of a checkpoint. The checkpoint is not validated."""
    return bool(_COMPLETE.fullmatch(folder.name)) and folder.is_dir()


def check_step(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedError unless the name of the checkpoint's folder has the step of the manifest."""
    name = _COMPLETE.fullmatch(folder.name)
    if manifest.training and name and int(name[1]) != manifest.training.step:
        raise DamagedError(f"{MANIFEST_NAME} has step {manifest.training.step}, unlike the directory's name")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedError if a file of the checkpoint is missing or does not have the size in the manifest."""
    for file in manifest.files:
        try:
            status = (folder / file.name).stat()
        except OSError as error:
            raise DamagedError(f"{file.name} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{file.name} is not a regular file")
        if (found := status.st_size) != file.num_bytes:
            raise DamagedError(f"{file.name} has {found} bytes instead of the {file.num_bytes} bytes in the manifest")


def looks_good(folder: Path) -> bool:
    """Return whether all files have the sizes in the manifest. The contents of the files are not read."""
    try:
        check_sizes(folder, Manifest.read(folder))
    except (DamagedError, ValueError):
        return False
    return True


def is_own(folder: Path, run_id: str) -> bool:
    """Return whether the manifest of a checkpoint names run `run_id`. The result is False for a symbolic link."""
    if folder.is_symlink():
        return False
    try:
        training = Manifest.read(folder).training
    except (DamagedError, CheckpointError):
        return False
    return training is not None and training.run_id == run_id


def commit(partial: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name.

    Raises CheckpointError if a checkpoint already has this name. A run sets a checkpoint aside before it saves the same
    step again, so that the older checkpoint is never deleted for one that is not complete.
    """
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final} already exists. Move it away.")
    partial.rename(final)
    sync_folder(final.parent)


def set_aside(folder: Path, state: Literal["damaged", "unhealthy"]) -> Path:
    """Rename a checkpoint so that no run loads it again, and return the new path."""
    target = folder.with_name(f"{folder.name}.{state}")
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.{state}-{number}")
    folder.rename(target)
    return target


def prune(directory: Path, keep: int, token: str, healthy_before: int, verified: Collection[int]) -> None:
    """Delete old checkpoints of the run that `token` belongs to.

    The `keep` newest checkpoints among the steps `verified`, whose checksums have been compared with their files, and
    all newer checkpoints are kept. The newest verified checkpoint of a step below `healthy_before` is also kept,
    because its weights are known to produce a finite loss and finite gradients. Without such a checkpoint, nothing is
    deleted. If deletions fail, the OSError of the last failed deletion is raised at the end.
    """
    own = [step for step in steps_in(directory) if is_own(folder_of(directory, step), run_id_of(token))]
    good = [step for step in own if step in verified and looks_good(folder_of(directory, step))]
    healthy = next((step for step in good if step < healthy_before), None)
    if len(good) < keep or healthy is None:
        return
    problem: OSError | None = None
    for step in own:
        if step < good[keep - 1] and step != healthy:
            try:
                discard(folder_of(directory, step), token)
            except OSError as error:
                problem = error
    if problem:
        raise problem


def discard(folder: Path, token: str) -> None:
    """Delete a checkpoint of this run. `remove_partial` completes a deletion that was interrupted."""
    trash = folder.with_name(f".{folder.name}.{token}-{secrets.token_hex(2)}.partial.old")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def remove_partial(directory: Path, run_id: str) -> list[Path]:
    """Delete the incomplete checkpoints of this run, and return the incomplete checkpoints of other runs."""
    others = []
    for path in sorted(directory.iterdir()):
        if found := _PARTIAL.fullmatch(path.name):
            if found["run_id"] == run_id and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                others.append(path)
    return others
