"""A directory of checkpoints: their names, which are complete, and which may go. No torch.

.run-id                                     the identity of the run that saves here, and what launched it
step-00000006/                              complete: files and a manifest
.step-00000012.9a31c2-1f0c.partial/         being written by the run 9a31c2, or left behind when it died
.step-00000003.9a31c2-77e0.partial.old/     being deleted by that run
step-00000012.damaged/                      set aside by a run that resumed from an older one

A run deletes only what it created. The manifest of a checkpoint names the run that wrote it, and so does the name of an
unfinished directory. Symbolic links are never followed.
"""

import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from megabench.atomic_write import write_atomically
from megabench.checkpoint import CheckpointError
from megabench.checkpoint.manifest import MANIFEST_NAME, DamagedError, Manifest, sync_folder

RUN_ID_NAME = ".run-id"
_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-\d{8,}\.(?P<run_id>[0-9a-f]+)(-[0-9a-f]+)*\.partial(\.old)?")


def claim_run_id(directory: Path, launch_id: str, continues: bool) -> str:
    """Record that the run of this launch saves to `directory` from now on, and return the run's identity.

    A run that continues the one that saved there before inherits its identity; any other run gets a new one.
    CheckpointError if the directory takes no files.
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
    """Whether the run that last saved to `directory` has this launch id."""
    owner = _owner(directory)
    return owner is not None and owner[1] == launch_id


def _owner(directory: Path) -> tuple[str, str] | None:
    """The identity of the run that last saved to `directory`, and its launch id; None if the file cannot be read."""
    try:
        run_id, launch_id = (directory / RUN_ID_NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return (run_id, launch_id) if re.fullmatch("[0-9a-f]{12}", run_id) else None


def new_token(run_id: str) -> str:
    """A token that distinguishes the partial directories of this start of a run from those of its earlier starts."""
    return f"{run_id}-{secrets.token_hex(4)}"


def run_id_of(token: str) -> str:
    return token.partition("-")[0]


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint behind `step` steps lies."""
    return directory / f"step-{step:08d}"


def partial_folder(directory: Path, step: int, token: str) -> Path:
    """The directory that a checkpoint is written to before it is complete; for `token` see `new_token`."""
    return directory / f".{folder_of(directory, step).name}.{token}.partial"


def bytes_in(folder: Path) -> int:
    """The size of the files in a folder, which may come and go meanwhile."""
    size = 0
    with suppress(OSError):
        for entry in folder.iterdir():
            size += entry.stat().st_size
    return size


def steps_in(directory: Path) -> list[int]:
    """The steps of the checkpoints in a directory, the newest first; good or not."""
    if not directory.is_dir():
        return []
    found = (_COMPLETE.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
    return sorted((int(name[1]) for name in found if name), reverse=True)


def is_checkpoint(folder: Path) -> bool:
    """Whether this is the folder of one checkpoint, by its name; good or not."""
    return bool(_COMPLETE.fullmatch(folder.name)) and folder.is_dir()


def check_step(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedError unless the name of the checkpoint's folder has the step of the manifest."""
    name = _COMPLETE.fullmatch(folder.name)
    if manifest.training and name and int(name[1]) != manifest.training.step:
        raise DamagedError(f"{MANIFEST_NAME} says step {manifest.training.step}, unlike the name of the folder")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """DamagedError unless every file is there with its size."""
    for file in manifest.files:
        try:
            status = (folder / file.name).stat()
        except OSError as error:
            raise DamagedError(f"{file.name} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{file.name} is not a regular file")
        if (found := status.st_size) != file.num_bytes:
            raise DamagedError(f"{file.name} has {found} bytes, and the manifest says {file.num_bytes}")


def looks_good(folder: Path) -> bool:
    """Whether the manifest agrees with the sizes of the files; their content is not read."""
    try:
        check_sizes(folder, Manifest.read(folder))
    except (DamagedError, ValueError):
        return False
    return True


def is_own(folder: Path, run_id: str) -> bool:
    """Whether the run `run_id` created this checkpoint: a directory, not a link, whose manifest names the run."""
    if folder.is_symlink():
        return False
    try:
        training = Manifest.read(folder).training
    except (DamagedError, CheckpointError):
        return False
    return training is not None and training.run_id == run_id


def commit(partial: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name, which must be free."""
    partial.rename(final)
    sync_folder(final.parent)


def make_way(final: Path, token: str) -> None:
    """Delete this run's older checkpoint at `final`; CheckpointError if another run's checkpoint is there."""
    if final.exists() or final.is_symlink():
        if not is_own(final, run_id_of(token)):
            raise CheckpointError(f"{final} exists, and this run did not write it. Move it away.")
        discard(final, token)


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint, so that it is never taken for one again; its new name."""
    target = folder.with_name(f"{folder.name}.damaged")
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.damaged-{number}")
    folder.rename(target)
    return target


def prune(directory: Path, keep: int, token: str, healthy_before: int) -> None:
    """Delete all but the `keep` newest complete checkpoints of the run that `token` belongs to.

    The newest one of a step below `healthy_before` is always kept: the loss and the gradients that were computed from
    its weights are known to be finite. Raises the OSError of the last deletion that failed, after trying them all.
    """
    own = [step for step in steps_in(directory) if is_own(folder_of(directory, step), run_id_of(token))]
    good = [step for step in own if looks_good(folder_of(directory, step))]
    if len(good) <= keep:
        return
    healthy = next((step for step in good if step < healthy_before), None)
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
    """Delete a checkpoint of this run; if the process dies meanwhile, `remove_partial` deletes the rest."""
    trash = folder.with_name(f".{folder.name}.{token}-{secrets.token_hex(2)}.partial.old")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def remove_partial(directory: Path, run_id: str) -> list[Path]:
    """Delete the unfinished saves of earlier starts of this run. Return those of other runs, which are kept."""
    others = []
    for path in sorted(directory.iterdir()):
        if found := _PARTIAL.fullmatch(path.name):
            if found["run_id"] == run_id and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                others.append(path)
    return others
