"""What every process of megabench sets before it reads its settings. Loads no torch."""

import io
import os
import socket
import sys
from collections.abc import Sequence

from megabench.errors import UserError, printable

# With this variable, `python -m` and multiprocessing do not search the working directory for modules. The directory may
# be a downloaded model, whose pydantic.py would be executed in place of the library. Child processes inherit the
# variable from torchrun, too.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


class ArgumentError(UserError):
    """Raised for an argument that cannot be decoded."""


def host_name() -> str:
    """Return the name of this host, with printable characters only."""
    return printable(socket.gethostname())


def set_up_process(arguments: Sequence[str]) -> None:
    """Protect the child processes of a command from modules of the working directory, and check its arguments.

    Characters that standard output cannot encode are escaped. Raises ArgumentError for an argument that is not valid
    text, because records, event files and report pages could not contain it.
    """
    os.environ |= SAFE_PATH
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for argument in arguments:
        if printable(argument) != argument:
            raise ArgumentError(
                f"the argument {printable(argument)} contains a byte that is not valid "
                f"{sys.getfilesystemencoding()}; rename the file, or correct the argument"
            )
