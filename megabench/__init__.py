"""Find the parallel layout that trains fastest on this cluster, compare the layout with ZeRO-3, and train with it."""

__version__ = "0.1.0"


class UserError(ValueError):
    """Raised for invalid input from the user. The message says what is wrong, where, and what to do.

    Command lines print the sentence without a traceback and exit with `exit_status`.
    """

    exit_status = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # names that are read from files may contain line breaks


def error_message(error: UserError | OSError) -> str:
    """Return the sentence for the user. Raises `error` itself if `error` is an OSError that names no file."""
    if isinstance(error, UserError):
        return str(error)
    if error.filename is None:
        raise error
    return f"cannot access {str(error.filename)[:500]}: {error.strerror}; use another path"
