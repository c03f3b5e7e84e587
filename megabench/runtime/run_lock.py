"""Who writes into a folder: the process that claimed it last. Loads no torch.

A job that is submitted twice writes twice into the same places. A claim is a small file that names its owner. While
that process is alive on the same host a second one is refused; from another host that cannot be known, so the folder
changes hands, and the first finds out when it looks. What a process that died leaves behind is in nobody's way.
"""

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megabench import UserError

_NAME = ".claim.json"
_TOKEN = secrets.token_hex(8)  # of this process
_SAME_SECONDS = 0.1  # by which the age of one process may differ, by rounding


class RunLockedError(UserError):
    """A folder that another process writes into, or that takes no files."""


@dataclass(frozen=True)
class _Owner:
    """A process, by a token of its own.

    `began`, in seconds since the host booted, tells it from a later one of its number; `since` is when it claimed.
    """

    token: str
    host: str
    pid: int
    began: float
    since: str

    @classmethod
    def of(cls, folder: Path) -> "_Owner | None":
        """Whom the folder belongs to; None where nobody can be read. FileNotFoundError where it is nobody's."""
        try:
            return cls(**json.loads((folder / _NAME).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, TypeError):
            return None

    @property
    def is_alive_here(self) -> bool:
        if self.host != socket.gethostname():
            return False
        try:
            is_same = abs(_began(self.pid) - self.began) < _SAME_SECONDS
            return is_same and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host} (since {self.since})"


class RunLock:
    """This process's claim to write into a folder that exists."""

    def __init__(self, folder: Path) -> None:
        """Raises RunLockedError as `check_free` does, and where no file can be written."""
        self.folder = folder
        path, mine = folder / _NAME, folder / f".claim.{_TOKEN}.partial"
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        me = _Owner(_TOKEN, socket.gethostname(), os.getpid(), _began(os.getpid()), now)
        try:
            mine.write_text(json.dumps(asdict(me)) + "\n", encoding="utf-8")
            with suppress(OSError):  # it is somebody's, or links are unknown here
                os.link(mine, path)  # of several that find it nobody's, one gets it
                return
            check_free(folder)
            mine.replace(path)
        except OSError as error:
            raise RunLockedError(f"{folder} takes no files: {error.strerror}; give another folder") from None
        finally:
            with suppress(OSError):
                mine.unlink()

    @property
    def loss(self) -> str | None:
        """That another has the folder, or has had it since, in a sentence; None while it is this process's."""
        try:
            owner = _Owner.of(self.folder)
        except FileNotFoundError:
            return f"the claim to {self.folder} is gone: another run has ended there since; was this job started twice?"
        if owner is None or owner.token == _TOKEN:
            return None
        return f"{owner} has taken over {self.folder}: was this job started twice?"

    def release(self) -> None:
        """Leaves the folder to whoever comes next, and no file behind."""
        if self.loss is None:
            with suppress(OSError):
                (self.folder / _NAME).unlink()


def check_free(folder: Path) -> None:
    """Raises RunLockedError where another process of this host has claimed the folder and is alive."""
    with suppress(FileNotFoundError):
        owner = _Owner.of(folder)
        if owner and owner.token != _TOKEN and owner.is_alive_here:
            raise RunLockedError(f"{owner} writes into {folder}; end it first, or give another folder")


def _began(pid: int) -> float:
    """When a process began, in seconds since its host booted: that stays when the clock is set."""
    return psutil.Process(pid).create_time() - psutil.boot_time()
