"""Console for the tables that commands print. This module does not import torch."""

import sys

from rich.console import Console

_PLAIN_WIDTH = 250  # wider than any table, to avoid truncated tables in files and pipes


def standard_output() -> Console:
    """Return a console as wide as the terminal, or 250 columns wide if standard output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
