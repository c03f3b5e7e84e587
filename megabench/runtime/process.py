"""The set-up of every process of megabench before it reads its settings, and its exit. This module loads no torch."""

import atexit
import contextlib
import gc
import io
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from megabench.errors import UserError, printable

# With this variable, `python -m` and multiprocessing do not search the working directory for modules. The directory may
# be a downloaded model, whose pydantic.py would be executed in place of the library. Child processes inherit the
# variable from torchrun, too.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}

_skips_shutdown = False


class ArgumentError(UserError):
    """Raised for an argument that cannot be decoded."""


def host_name() -> str:
    """Return the name of this host, with printable characters only."""
    return printable(socket.gethostname())


def set_up_process(arguments: Sequence[str]) -> None:
    """Keep child processes from importing modules of the working directory, and check the arguments of the command.

    Characters that standard output cannot encode are escaped. No garbage is collected until `collect_garbage` is
    called: collections during the imports would take a fifth of the time of the start. Raises ArgumentError for an
    argument that is not valid text, because records, event files and report pages could not contain it.
    """
    gc.disable()
    os.environ |= SAFE_PATH
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for argument in arguments:
        if printable(argument) != argument:
            raise ArgumentError(
                f"the argument {printable(argument)} contains a byte that is not valid "
                f"{sys.getfilesystemencoding()}; rename the file, or correct the argument"
            )


def collect_garbage() -> None:
    """Collect garbage from now on, but not among the objects that exist now.

    Commands that run long or hold large tensors call this function after their imports, which create most objects.
    """
    gc.freeze()
    gc.enable()


def signal_title(number: int) -> str:
    """Return a signal as text: "signal 9 (SIGKILL)"."""
    name = signal.Signals(number).name if number in set(signal.Signals) else "a real-time signal"
    return f"signal {number} ({name})"


def killer_hint(number: int) -> str:
    """Return what usually sends a signal, as the end of a sentence, or "" if that is not known."""
    return "; on Linux that is often the out-of-memory killer" if number == signal.SIGKILL else ""


def exit_on_sigterm() -> None:
    """Exit normally after SIGTERM, so that temporary files are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def skip_shutdown() -> None:
    """Note that this process may create process groups, so that `end` must use `exit_process`."""
    global _skips_shutdown
    _skips_shutdown = True


def end(status: int) -> NoReturn:
    """End the process of a command with `status`."""
    if _skips_shutdown:
        exit_process(status)
    sys.exit(status)


def exit_process(status: int) -> NoReturn:
    """End this process with `status`: call atexit functions and flush output, but skip the interpreter's shutdown.

    Gloo threads outlive `destroy_process_group` while anything refers to a group, and megatron-core keeps references.
    If such a thread frees a tensor during interpreter shutdown, PyTorch aborts the process
    (https://github.com/pytorch/pytorch/issues/190489). The launcher would then report a finished run as failed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the process that reads the pipe may have exited
            stream.flush()
    os._exit(status)
