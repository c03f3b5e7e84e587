"""Data types of the report's charts, and the names and colors of trials in the charts."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from megabench.report.line_charts import line_classes
from megabench.report.trials import Shown, WorkClassOfTrials


@dataclass(frozen=True)
class Figures:
    """A small table: column headings and rows of cells."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A picture with a heading, an explanation, a legend of (CSS class, label) pairs, and its values as a table."""

    heading: str
    words: str
    picture: Markup
    legend: tuple[tuple[str, str], ...] = ()
    figures: Figures | None = None
    is_wide: bool = False


def strip_class(trial: Shown, group: WorkClassOfTrials) -> str:
    """Return the CSS class that colors the strip of a trial: failed, best, reference or plain."""
    if not trial.row.is_ok:
        return "bad"
    if trial.row is group.decision.best:
        return "best"
    return "reference" if trial.row is group.decision.reference else "plain"


def strip_name(trial: Shown, group: WorkClassOfTrials) -> str:
    """Return the trial's letter and name, followed by "fastest", "reference" or the failure status."""
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
    """Return the legend of a line chart: the line style, letter and name of each trial."""
    return tuple((line_classes(trial.number), f"{trial.letter} · {trial.name}") for trial in shown)
