"""megabench: which parallel layout trains fastest on this cluster, proven against ZeRO-3, and then training with it."""

__version__ = "0.1.0"


class UserError(ValueError):
    """An invalid input of the user. The message says what is wrong, where, and what to do.

    Command lines print the sentence without a traceback and exit with status 2.
    """

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # names from files may contain line breaks


def error_message(error: UserError | OSError) -> str:
    """Return the sentence for the user. Raises `error` itself if it is an OSError that names no file."""
    if isinstance(error, UserError):
        return str(error)
    if error.filename is None:
        raise error
    return f"cannot access {str(error.filename)[:500]}: {error.strerror}; use another path"
