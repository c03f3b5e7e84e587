"""The base class of errors that a user can correct, and their messages."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Raised for invalid input from the user. The message says what is wrong, where, and what to do.

    Command lines print the sentence without a traceback and exit with `exit_status`.
    """

    exit_status = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # names that are read from files may contain line breaks


def near_names(word: str, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the names that are similar to `word`, the most similar first. Upper and lower case are equal."""
    by_lower_case = {name.lower(): name for name in known}
    return [by_lower_case[near] for near in get_close_matches(word.lower(), by_lower_case, n=most, cutoff=cutoff)]


def one_line(error: BaseException) -> str:
    """Return the type and the message of an error as one line: "RuntimeError: no such layer"."""
    return " ".join(f"{type(error).__name__}: {error}".split())


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
