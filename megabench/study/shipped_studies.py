"""The list of the studies that come with megabench. Loads no torch."""

from rich.console import Console
from rich.table import Table

from megabench import shipped
from megabench.study.study import StudyFile


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
