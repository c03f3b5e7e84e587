"""Console for the tables that commands print. This module does not import torch."""

import sys

from rich.console import Console

_PLAIN_WIDTH = 250  # files and pipes get a width that is larger than any table, so that no table is truncated


def standard_output() -> Console:
    """Return a console as wide as the terminal, or 250 columns wide if standard output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
