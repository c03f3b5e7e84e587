"""What a chart of the page is, and how a trial is named and coloured in all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from megabench.report.line_charts import line_classes
from megabench.report.trials import Shown, WorkClassOfTrials


@dataclass(frozen=True)
class Figures:
    """A small table: heads, and rows of cells."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A picture with its heading, what to see in it, a legend of (class, words), and its figures as a table."""

    heading: str
    words: str
    picture: Markup
    legend: tuple[tuple[str, str], ...] = ()
    figures: Figures | None = None
    is_wide: bool = False


def strip_class(trial: Shown, group: WorkClassOfTrials) -> str:
    """The class that colours a trial's strip by its part in the verdict."""
    if not trial.row.is_ok:
        return "bad"
    if trial.row is group.decision.best:
        return "best"
    return "reference" if trial.row is group.decision.reference else "plain"


def strip_name(trial: Shown, group: WorkClassOfTrials) -> str:
    """The trial's letter and name, and its part in the verdict."""
    compared = len(group.decision.good) > 1
    part = {
        "best": " · fastest" * compared,
        "reference": " · reference",
        "bad": f" · {trial.row.status.upper()}",
        "plain": "",
    }
    if trial.row is group.decision.best and group.decision.equals:
        part["best"] = ""
    return f"{trial.letter} · {trial.name}{part[strip_class(trial, group)]}"


def letter_legend(shown: Sequence[Shown]) -> tuple[tuple[str, str], ...]:
    """The legend of a chart of lines: a line and the letter and name of each trial."""
    return tuple((line_classes(trial.number), f"{trial.letter} · {trial.name}") for trial in shown)
