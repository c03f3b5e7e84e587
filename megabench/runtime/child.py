"""One trainer process in its own session, which ends together with its supervisor and its own children."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil

from megabench.runtime.namespace import enter_namespace
from megabench.runtime.process import SAFE_PATH

TERM_GRACE_SECONDS = 5.0
KILL_WAIT_SECONDS = 15.0

_LAUNCHER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET)_.*)"
)
# torch prints notes such as "[rank0]:[W120 09:14:02.1 ProcessGroupNCCL.cpp:1496] Warning: …" after the real cause
_LIBRARY_NOTE = re.compile(r"(\[rank\d+\]:)?\s*\[?[WI]\d{3,4} ")
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_PR_SET_PDEATHSIG = 1
# load the library before any fork, because a child must not load libraries between fork and exec
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent() -> None:
    """Make the kernel kill this process as soon as its parent process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process and its log.

    The process runs in the network namespace of the file descriptor `namespace`, if one is given. Its exit is reported
    only after all its child processes have been killed.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, namespace: int | None = None
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        supervisor = os.getpid()

        def before_exec() -> None:
            die_with_parent()
            if os.getppid() != supervisor:  # the supervisor ended before this process called prctl
                os._exit(1)
            if namespace is not None:
                enter_namespace(namespace)

        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env={**environment, **SAFE_PATH},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=before_exec,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        """The exit status of the process, negative if a signal ended the process, or None while the process runs."""
        if self._process.returncode is None:
            # WNOWAIT leaves a zombie, so the kernel cannot reuse the process id before the group is killed
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        return self._process.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, but not to its children, if the process still runs."""
        if self.exit_status() is None:
            os.kill(self.pid, number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and its child processes, if it still runs."""
        if self.exit_status() is None:
            os.killpg(self.pid, number)

    def last_line(self) -> str:
        """The last line that the process printed, or "". Empty lines and messages of libraries are ignored."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 16384))
            text = _TERMINAL_CODE.sub("", log.read().decode(errors="replace"))
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return next((line for line in reversed(lines) if not _LIBRARY_NOTE.match(line)), "")[:300]


def end_all(children: Collection[Child], wait: Callable[[], None] = lambda: time.sleep(0.05)) -> None:
    """End the running children and their process groups, first with SIGTERM, then with SIGKILL.

    `wait` is called repeatedly until all processes have ended.
    """
    for number, patience in ((signal.SIGTERM, TERM_GRACE_SECONDS), (signal.SIGKILL, KILL_WAIT_SECONDS)):
        running = [child for child in children if child.exit_status() is None]
        for child in running:
            child.send_to_group(number)
        deadline = time.monotonic() + patience
        while any(child.exit_status() is None for child in running) and time.monotonic() < deadline:
            wait()


def end_strays(variables: Mapping[str, str]) -> list[int]:
    """Kill all processes of this user whose environment has these variables. Return their process ids.

    A daemon that a child started in its own session is in no process group of a `Child`, but inherits the child's
    environment.
    """
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if all(environment.get(name) == value for name, value in variables.items()) and process.pid != os.getpid():
                process.kill()
                killed.append(process.pid)
    return killed


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that torchrun sets for its workers."""
    return {name: value for name, value in environment.items() if not _LAUNCHER_VARIABLES.fullmatch(name)}
