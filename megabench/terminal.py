"""The console for tables. Loads no torch."""

import sys

from rich.console import Console

_PLAIN_WIDTH = 250  # wider than any table, so that files and pipes receive complete lines


def standard_output() -> Console:
    """Return a console with the width of the terminal, or wide enough for every table without a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
