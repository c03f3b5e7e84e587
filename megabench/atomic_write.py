"""Files that are there whole or not at all. Loads no torch."""

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes or replaces a text file, atomically; until then it lies beside it, with the suffix .partial."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
