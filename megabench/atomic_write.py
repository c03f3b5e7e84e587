"""Write files atomically. Loads no torch."""

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write or replace a text file atomically, by renaming a temporary file with the suffix .partial."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
