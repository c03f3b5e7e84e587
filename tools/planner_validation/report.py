"""Validation table: accuracy of the planner and of a constant-MFU null model. This module does not import torch."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megabench.cost.profile import Profile
from tools.planner_validation.fit import predicted_gib, predicted_seconds
from tools.planner_validation.program_costs import costs
from tools.planner_validation.published import DataError, Row
from tools.planner_validation.score import Accuracy, Alarm, accuracy, alarm, is_in_first_two, regret, spearman

_HEAD = (
    "| rows | n | MAPE | median error | Spearman | within a sweep | top-1 regret, mean | median | best in first two "
    "| memory: median error | within 10% | OOM precision | OOM recall |"
)

# the names of the lines in docs/planning.md: sources, the sweep by number of GPUs, and this project by machine
_IN_DOCS = (
    r"(?!playbook|own|·)[^(]*(?<!sources only)|playbook sweep, \d+ GPUs, (on healthy nodes|with its NCCL tests)"
    r"|own records, all others.*"
)
_MOST_WORSE = 0.02  # the largest increase of a source's mean error for which fitted constants are shipped


@dataclass(frozen=True)
class Line:
    """One line of the validation table: the accuracy of the planner or of the null model on a set of rows.

    `sizes` are the smallest and the largest number of GPUs.
    """

    name: str
    sizes: tuple[int, int]
    accuracy: Accuracy
    within: float | None
    regrets: list[float]
    in_first_two: list[bool]
    memory_error: float | None = None
    memory_within: float | None = None
    oom: Alarm | None = None

    def markdown(self) -> str:
        cells = [
            self.name,
            str(self.accuracy.count),
            _percent(self.accuracy.mape),
            _percent(self.accuracy.median),
            _number(self.accuracy.spearman),
            _number(self.within),
            _percent(statistics.mean(self.regrets) if self.regrets else None),
            _percent(statistics.median(self.regrets) if self.regrets else None),
            _fraction(self.in_first_two),
            _percent(self.memory_error),
            _percent(self.memory_within),
            _number(self.oom.precision if self.oom else None),
            _number(self.oom.recall if self.oom else None),
        ]
        return f"| {' | '.join(cells)} |"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def _fraction(values: Sequence[bool]) -> str:
    return f"{sum(values)} of {len(values)}" if values else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def null_model(rows: Iterable[Row], profiles: Mapping[str, Profile]) -> Callable[[Row], float]:
    """Return a null model that predicts step times from the median MFU of each GPU's fitted rows for any layout."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if "seconds" in row.measured:
            found.setdefault(_profile(row, profiles).name, []).append(_ideal(row, profiles) / row.measured["seconds"])
    mfu = {name: statistics.median(values) for name, values in found.items()}
    return lambda row: _ideal(row, profiles) / mfu[_profile(row, profiles).name]


def _profile(row: Row, profiles: Mapping[str, Profile]) -> Profile:
    device = row.topology.hosts[0].device
    return next(profile for profile in profiles.values() if device in profile.devices)


def measured_profile(row: Row, profiles: Mapping[str, Profile]) -> Profile:
    """Return the profile of a row's GPU, with the network as measured on the run's own nodes."""
    profile = _profile(row, profiles)
    return row.fabric.profile_on(profile, row.topology) if row.fabric else profile


def _ideal(row: Row, profiles: Mapping[str, Profile]) -> float:
    """Return the seconds of a step at the peak FLOP/s of the GPUs."""
    peak = _profile(row, profiles).peak(row.topology.hosts[0].device, row.job.precision)
    return row.job.flops_per_token * row.job.tokens / (peak * row.candidate.layout.world_size)


def lines(name: str, rows: Sequence[Row], profiles: Mapping[str, Profile], null: Callable[[Row], float]) -> list[Line]:
    """Return the table lines of the planner and of the null model for a set of rows.

    Rows with a measured fabric have a further line, of the planner without their fabric.
    """
    own = [measured_profile(row, profiles) for row in rows]
    found = [_planner_line(name, rows, own)]
    if any(row.fabric for row in rows):
        found.append(_planner_line("· on a healthy network", rows, [_profile(row, profiles) for row in rows]))
    timed = [row for row in rows if "seconds" in row.measured]
    guesses = [null(row) for row in timed]
    return [*found, _line("· constant MFU", timed, guesses, guesses)]


def _planner_line(name: str, rows: Sequence[Row], profiles: Sequence[Profile]) -> Line:
    """Return the line of the planner with one profile per row."""
    timed = [(row, profile) for row, profile in zip(rows, profiles, strict=True) if "seconds" in row.measured]
    predicted = [predicted_seconds(row, profile) for row, profile in timed]
    # The planner does not choose a layout that is predicted not to fit.
    chosen_from = [
        math.inf if _misses(row, profile) else seconds for (row, profile), seconds in zip(timed, predicted, strict=True)
    ]
    line = _line(name, [row for row, _ in timed], predicted, chosen_from)
    peaks = [(row, profile) for row, profile in zip(rows, profiles, strict=True) if "memory_gib" in row.measured]
    errors = [abs(predicted_gib(row, profile) / row.measured["memory_gib"] - 1) for row, profile in peaks]
    # ignore configurations that ran in one row and failed in another
    ended = [
        (row, profile)
        for row, profile in zip(rows, profiles, strict=True)
        if ("oom" in row.measured) != ("seconds" in row.measured)
    ]
    happened = ["oom" in row.measured for row, _ in ended]
    said = [row.is_refused or _misses(row, profile) for row, profile in ended]
    return replace(
        line,
        memory_error=statistics.median(errors) if errors else None,
        memory_within=sum(error <= 0.1 for error in errors) / len(errors) if errors else None,
        oom=alarm(said, happened) if any(happened) else None,
    )


def _line(name: str, timed: Sequence[Row], predicted: Sequence[float], chosen_from: Sequence[float]) -> Line:
    """Return a line without scores of memory.

    In each sweep, the layout with the smallest value of `chosen_from` is chosen.
    """
    within = [value for a, b in _sweeps(timed, predicted) if (value := spearman(a, b)) is not None]
    choices = [(a, b) for a, b in _sweeps(timed, chosen_from) if min(a) < math.inf]
    return Line(
        name=name,
        sizes=(min(row.topology.world_size for row in timed), max(row.topology.world_size for row in timed)),
        accuracy=accuracy(predicted, [row.measured["seconds"] for row in timed]),
        within=statistics.mean(within) if within else None,
        regrets=[regret(a, b) for a, b in choices],
        in_first_two=[is_in_first_two(a, b) for a, b in choices],
    )


def _sweeps(rows: Sequence[Row], predicted: Sequence[float]) -> list[tuple[list[float], list[float]]]:
    """Return the predicted and measured step times of each sweep with at least three rows.

    A sweep contains the rows with the same work on the same number of GPUs.
    """
    groups: dict[object, tuple[list[float], list[float]]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        a, b = groups.setdefault((row.group, row.job.seq_length, row.job.global_batch, row.job.precision), ([], []))
        a.append(seconds)
        b.append(row.measured["seconds"])
    return [group for group in groups.values() if len(group[0]) >= 3]


def _misses(row: Row, profile: Profile) -> bool:
    return costs(row.job, row.topology, profile).missing_bytes(row.candidate) > 0


def docs_table(found: Sequence[Line]) -> str:
    """Return the lines of runs to which no step time was fitted as a Markdown table for docs/planning.md."""
    rows = ["| Runs | Number | GPUs | Mean error | Best in first two | Mean regret | Constant MFU |"]
    rows.append("|" + " --- |" * 7)
    for line, null in pairwise(line for line in found if line.name != "· on a healthy network"):
        if not re.fullmatch(_IN_DOCS, line.name):
            continue
        few, many = line.sizes
        cells = [
            line.name,
            str(line.accuracy.count),
            f"{few:,}" if few == many else f"{few:,} to {many:,}",
            _percent(line.accuracy.mape),
            _fraction(line.in_first_two),
            _percent(statistics.mean(line.regrets) if line.regrets else None),
            _percent(null.accuracy.mape),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def check_against(kept: str, found: Iterable[Line]) -> None:
    """Raise DataError if the error of a line is more than 2 points above that of the same line in the table `kept`.

    So no change that helps the runs of one source is kept if it worsens the runs of another.
    """
    before: dict[str, float] = {}
    for line in kept.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and cells[3].endswith("%") and not cells[1].startswith("·"):
            before[cells[1]] = float(cells[3].removesuffix("%")) / 100
    worse = [
        f"{line.name} from {_percent(before[line.name])} to {_percent(line.accuracy.mape)}"
        for line in found
        if line.accuracy.mape > before.get(line.name, math.inf) + _MOST_WORSE
    ]
    if worse:
        raise DataError(
            f"the result is rejected, because it increases the mean error of {'; '.join(worse)}. Fit the constants of "
            f"each kind of network, GPU and program to its own runs, or use --accept-worse."
        )


def table(found: Iterable[Line]) -> str:
    """Return the lines as a Markdown table."""
    rule = "|" + " --- |" * (_HEAD.count("|") - 1)
    return "\n".join([_HEAD, rule, *(line.markdown() for line in found)])
