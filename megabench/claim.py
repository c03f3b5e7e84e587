"""Who writes into a folder: the process that claimed it last. Loads no torch.

A job that is submitted twice writes twice into the same places. A claim is a small file that names its owner. While
that process is alive on the same host a second one is refused; from another host that cannot be known, so the folder
changes hands, and the first finds out before it writes again. What a process that died leaves behind is in nobody's
way.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megabench import UserError
from megabench.whole_file import write_whole

_NAME = ".claim.json"
_CLOCK_SECONDS = 2.0  # by which a process's age may seem to change, as the host's clock is set


class ClaimedError(UserError):
    """A folder that another process writes into, or that takes no files."""


@dataclass(frozen=True)
class _Owner:
    """A process; `began` tells it from a later one of the same number, and `since` is when it claimed the folder."""

    host: str
    pid: int
    began: float
    since: str

    @classmethod
    def of(cls, folder: Path) -> "_Owner | None":
        """Whom the folder belongs to; None where nobody can be read."""
        try:
            return cls(**json.loads((folder / _NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def is_me(self) -> bool:
        return self._is_here and self.pid == os.getpid()

    @property
    def is_alive_here(self) -> bool:
        try:
            return self._is_here and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    @property
    def _is_here(self) -> bool:
        if self.host != socket.gethostname():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.began) < _CLOCK_SECONDS
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host} (since {self.since})"


class Claim:
    """This process's claim to write into a folder that exists."""

    def __init__(self, folder: Path) -> None:
        """Raises ClaimedError as `check_free` does, and where no file can be written."""
        check_free(folder)
        self.folder = folder
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        me = _Owner(socket.gethostname(), os.getpid(), psutil.Process().create_time(), now)
        try:
            write_whole(folder / _NAME, json.dumps(asdict(me)) + "\n")
        except OSError as error:
            raise ClaimedError(f"{folder} takes no files: {error.strerror}; give another folder") from None

    @property
    def loss(self) -> str | None:
        """Who has taken the folder over, in a sentence; None while it is still this process's."""
        owner = _Owner.of(self.folder)
        if owner is None or owner.is_me:
            return None
        return f"{owner} has taken over {self.folder}: was this job started twice?"

    def release(self) -> None:
        """Leaves the folder to whoever comes next, and no file behind."""
        if self.loss is None:
            (self.folder / _NAME).unlink(missing_ok=True)


def check_free(folder: Path) -> None:
    """Raises ClaimedError where another process of this host has claimed the folder and is alive."""
    owner = _Owner.of(folder)
    if owner and owner.is_alive_here and not owner.is_me:
        raise ClaimedError(f"{owner} writes into {folder}; end it first, or give another folder")
