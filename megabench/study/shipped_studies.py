"""The studies that come with megabench: find one by its name, and list all. Loads no torch."""

from difflib import get_close_matches
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megabench import shipped
from megabench.study.study import StudyError, StudyFile


def find_study(given: Path, expected: str = "study file") -> Path:
    """Return the path of a study file, or of the shipped study of this name.

    Raises StudyError if `given` looks like a name and is none; the message says what was expected.
    """
    path = shipped.find("studies", given)
    if not path.is_file() and path.suffix not in (".yaml", ".yml") and path.name == str(given):
        close = " or ".join(get_close_matches(str(given), shipped.names("studies")))
        raise StudyError(
            f"{given} is no {expected} or shipped study; {f'did you mean {close}? ' if close else ''}"
            f"megabench compare --list shows the shipped studies"
        )
    return path


def show_studies(console: Console) -> None:
    """Print the name, the hardware and the question of every shipped study."""
    table = Table(box=None, pad_edge=False)
    for heading in ("study", "needs", "question"):
        table.add_column(heading, no_wrap=heading != "question")
    for name in shipped.names("studies"):
        file = StudyFile.read(shipped.find("studies", name))
        table.add_row(name, _needs(file), file.question)
    console.print(table)
    console.print("\nRun a study: megabench compare NAME. Show its commands: megabench compare NAME --dry-run.")


def _needs(file: StudyFile) -> str:
    """Return the number of GPUs or CPU processes that all trials need."""
    if file.is_cpu_only:
        return "CPU"
    size = file.largest_world_size
    return f"{size} GPU{'s' * (size != 1)}" if size else "GPUs"
