"""The command line of megabench."""

from megabench.cli.commands import main

__all__ = ["main"]
