"""Atomic writes of text files. This module does not import torch."""

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write or replace a text file atomically, by writing a .partial file and renaming it."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
