"""Where tables are written for people. Loads no torch."""

import sys

from rich.console import Console

_PLAIN_WIDTH = 250  # wider than any table, so that files and pipes receive complete lines


def standard_output() -> Console:
    """As wide as the terminal, or, where there is none, as wide as any table."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
