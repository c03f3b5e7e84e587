"""Find the parallel layout that trains fastest on this cluster, compare the layout with ZeRO-3, and train with it.

The functions of the Python interface are `compare`, `load` and `plan` (megabench/api.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabench.api import Layout as Layout
    from megabench.api import StudyPlan as StudyPlan
    from megabench.api import StudyResults as StudyResults
    from megabench.api import compare as compare
    from megabench.api import load as load
    from megabench.api import plan as plan

__version__ = "0.2.0"
_INTERFACE = ("Layout", "StudyPlan", "StudyResults", "compare", "load", "plan")


class UserError(ValueError):
    """Raised for invalid input from the user. The message says what is wrong, where, and what to do.

    Command lines print the sentence without a traceback and exit with `exit_status`.
    """

    exit_status = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # names that are read from files may contain line breaks


def printable(text: str) -> str:
    """Return `text` with its lone surrogates escaped, e.g. "a\\udcff".

    Python decodes bytes of variables, paths and host names that are not valid text to lone surrogates, which no file
    in UTF-8 can contain.
    """
    return text.encode(errors="backslashreplace").decode()


def error_message(error: UserError | OSError) -> str:
    """Return the sentence for the user. Raises `error` itself if `error` is an OSError that names no file."""
    if isinstance(error, UserError):
        return str(error)
    if error.filename is None:
        raise error
    return f"cannot access {str(error.filename)[:500]}: {error.strerror}; use another path"


def __getattr__(name: str) -> Any:
    """Import the Python interface when it is first used, because the import takes a second."""
    if name not in _INTERFACE:
        raise AttributeError(f"module 'megabench' has no attribute {name!r}")
    return getattr(import_module("megabench.api"), name)
