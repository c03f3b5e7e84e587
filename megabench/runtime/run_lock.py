"""A lock that lets one run at a time write into a directory. Loads no torch.

A job that is submitted twice would write twice into the same directory. A lock is a small file that names its owner.
While the owner is alive on the same host, a second process is refused. A process on another host cannot check whether
the owner is alive, so it takes the directory over. The first owner notices the new owner at its next check. Locks left
behind by dead processes are ignored.
"""

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megabench.errors import UserError
from megabench.inputs import read_json
from megabench.runtime.process import host_name

_NAME = ".claim.json"
_TOKEN = secrets.token_hex(8)  # of this process
_SAME_SECONDS = 0.1  # rounding error of the start time of a process


class RunLockedError(UserError):
    """Raised if another process writes into the directory, or if the directory is not writable."""


@dataclass(frozen=True)
class _Owner:
    """The process that holds a lock.

    `began`, in seconds since the host booted, distinguishes it from a later process with the same id. `since` is the
    time at which the process took the lock.
    """

    token: str
    host: str
    pid: int
    began: float
    since: str

    @classmethod
    def of(cls, folder: Path) -> "_Owner | None":
        """Return the owner of the directory, or None if the lock file cannot be read.

        FileNotFoundError without an owner.
        """
        try:
            owner = cls(**read_json(folder / _NAME))
            is_number = isinstance(owner.pid, int) and isinstance(owner.began, int | float)
            is_valid = is_number and isinstance(owner.host, str) and 0 < owner.pid < 2**31
        except FileNotFoundError:
            raise
        except (OSError, ValueError, TypeError):
            return None
        return owner if is_valid else None

    @property
    def is_alive_here(self) -> bool:
        if self.host != host_name():
            return False
        try:
            is_same = abs(_began(self.pid) - self.began) < _SAME_SECONDS
            return is_same and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host} (since {self.since})"


class RunLock:
    """The lock of this process on an existing directory."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises RunLockedError as `check_free` does, and if the directory is not writable."""
        self.folder = folder
        path, mine = folder / _NAME, folder / f".claim.{_TOKEN}.partial"
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        me = _Owner(_TOKEN, host_name(), os.getpid(), _began(os.getpid()), now)
        try:
            mine.write_text(json.dumps(asdict(me)) + "\n", encoding="utf-8")
            with suppress(OSError):  # the lock exists, or the file system has no hard links
                os.link(mine, path)  # creating a hard link is atomic, so only one of several processes succeeds
                return
            check_free(folder)
            mine.replace(path)
        except OSError as error:
            raise RunLockedError(f"{folder} is not writable: {error.strerror}; use another directory") from None
        finally:
            with suppress(OSError):
                mine.unlink()

    @property
    def loss(self) -> str | None:
        """An error message if another process has taken the lock, or None if this process still holds the lock."""
        try:
            owner = _Owner.of(self.folder)
        except FileNotFoundError:
            if not self.folder.exists():
                return f"{self.folder} no longer exists, because it was deleted or unmounted during the run"
            return f"the lock of {self.folder} is gone: another run has ended there, or the files were deleted"
        if owner is None or owner.token == _TOKEN:
            return None
        return f"{owner} has taken over {self.folder}: was this job started twice?"

    def release(self) -> None:
        """Release the lock and delete its file."""
        if self.loss is None:
            with suppress(OSError):
                (self.folder / _NAME).unlink()


def check_free(folder: Path) -> None:
    """Raise RunLockedError if another process on this host holds the lock and is alive."""
    with suppress(FileNotFoundError):
        owner = _Owner.of(folder)
        if owner and owner.token != _TOKEN and owner.is_alive_here:
            raise RunLockedError(f"{owner} writes into {folder}; stop that process first, or use another directory")


def _began(pid: int) -> float:
    """Return the start time of a process in seconds since its host booted, which clock changes do not affect."""
    return psutil.Process(pid).create_time() - psutil.boot_time()
