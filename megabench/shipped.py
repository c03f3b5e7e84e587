"""The studies, clusters and files of programs that come with megabench, given by name."""

from pathlib import Path
from typing import Literal

CONFIGS = Path(__file__).parent / "configs"
Kind = Literal["studies", "clusters", "deepspeed", "trainer", "torchtitan"]


def names(kind: Kind) -> list[str]:
    """Return the names of all shipped files of a kind, in alphabetical order."""
    return sorted(path.stem for path in (CONFIGS / kind).iterdir())


def find(kind: Kind, given: str | Path) -> Path:
    """Return the shipped file whose name is `given`. Return `given` itself if it is a file or an unknown name.

    A file of the user with the same name takes precedence.
    """
    path = Path(given)
    if path.is_file():
        return path
    return next((file for file in (CONFIGS / kind).iterdir() if file.stem == str(given)), path)
