"""A directory of checkpoints: their names, which are complete, and which may go. No torch.

step-00000006/                  complete: files and a manifest
.step-00000012.1f0c.partial/    being written, or left behind by a run that died
step-00000012.damaged/          set aside by a run that went on from an older one
"""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from megabench.checkpoint.manifest import MANIFEST_NAME, DamagedError, Manifest, sync_folder

_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-\d{8,}\.[0-9a-f]+\.partial(\.old)?")


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint behind `step` steps lies."""
    return directory / f"step-{step:08d}"


def partial_folder(directory: Path, step: int, token: str) -> Path:
    """Where it is being written; `token` (hexadecimal) tells this try from the remains of others."""
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


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """DamagedError unless every file is there with its size."""
    for file in manifest.files:
        try:
            found = (folder / file.name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{file.name} cannot be read: {error.strerror}") from None
        if found != file.num_bytes:
            raise DamagedError(f"{file.name} has {found} bytes, and the manifest says {file.num_bytes}")


def looks_good(folder: Path) -> bool:
    """Whether the manifest agrees with the sizes of the files; their content is not read."""
    try:
        check_sizes(folder, Manifest.read(folder))
    except (DamagedError, ValueError):
        return False
    return True


def commit(partial: Path, final: Path) -> None:
    """Gives a checkpoint that is whole its name; an older one of that name makes way."""
    old = partial.with_name(f"{partial.name}.old")
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint, so that it is never taken for one again; its new name."""
    target = folder.with_name(f"{folder.name}.damaged")
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.damaged-{number}")
    folder.rename(target)
    return target


def prune(directory: Path, keep: int) -> None:
    """Removes what is older than the `keep` newest checkpoints that look good."""
    good = [step for step in steps_in(directory) if looks_good(folder_of(directory, step))]
    for step in steps_in(directory):
        if len(good) >= keep and step < good[keep - 1]:
            discard(folder_of(directory, step))


def discard(folder: Path) -> None:
    """Removes a checkpoint; a process that dies meanwhile leaves one without a manifest."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_partial(directory: Path) -> None:
    """Removes what runs that died while saving left behind."""
    for path in directory.iterdir():
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
