"""Atomic writes of files. This module does not import torch."""

from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write or replace a file atomically, by writing a .partial file and renaming it. Text is written in UTF-8."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
