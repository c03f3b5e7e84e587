"""Comparison of two studies, such as results of two dates or of two kinds of GPU."""

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from megabench.record import RunRecord
from megabench.report import bar_charts
from megabench.report.bar_charts import Strip
from megabench.report.trials import Shown, StudyView


@dataclass(frozen=True)
class Pair:
    """The trials with the same name in both studies.

    `change` is the speed in the second study divided by the speed in the first study. `remark` explains why `change`
    is missing, or states that both speeds are equal within the spread.
    """

    name: str
    first: Shown | None
    second: Shown | None
    change: float | None
    remark: str


def pairs_of(first: StudyView, second: StudyView) -> list[Pair]:
    """Return a pair for each trial name of either study, starting with the trials of the first study in order."""
    mine = {trial.name: trial for trial in first.trials}
    its = {trial.name: trial for trial in second.trials}
    return [_pair(name, mine.get(name), its.get(name)) for name in dict.fromkeys([*mine, *its])]


def comparison(pairs: list[Pair], names: tuple[str, str]) -> str:
    """Summarize the speed changes of all pairs in a sentence."""
    told = [pair for pair in pairs if pair.change is not None]
    if not told:
        return "The two studies have no comparable trials: the trial names or the training workloads differ."
    clear = [pair for pair in told if not pair.remark]
    faster = [pair for pair in clear if pair.change and pair.change > 1]
    num_equal = len(told) - len(clear)
    counts = f"{len(faster)} faster, {len(clear) - len(faster)} slower, {num_equal} equal within the spread"
    changes = [pair.change for pair in told if pair.change]
    reach = f"{min(changes):.2f} to {max(changes):.2f} ×" if len(changes) > 1 else f"{changes[0]:.2f} ×"
    of = "common trial" if len(told) == 1 else "common trials"
    return f"{names[1]} reaches {reach} the speed per device of {names[0]} in {len(told)} {of} ({counts})."


def draw_pairs(slug: str, pairs: list[Pair], names: tuple[str, str], device: str) -> Markup:
    """Draw two bars for each comparable trial, the bar of the first study above the bar of the second study."""
    made = []
    for pair in pairs:
        for trial, study, class_ in ((pair.first, names[0], "plain"), (pair.second, names[1], "reference")):
            speed = trial.row.tokens_per_second_per_device if trial and pair.change else None
            if trial and speed:
                made.append(Strip(f"{pair.name} · {study}", f"{speed:,.0f}", class_, speed, trial.spread))
    if not made:
        return Markup("")
    description = "; ".join(f"{strip.name}: {strip.figure}" for strip in made)
    return bar_charts.bars(slug, f"{names[0]} and {names[1]}", description, made, f"tok/s per {device}")


def settings_that_differ(first: StudyView, second: StudyView) -> list[tuple[str, str, str]]:
    """Return the machine, package versions and environment variables that differ between the studies."""
    found = [("machine", first.machine, second.machine)]
    for what in ("versions", "variables"):
        mine, its = _merged(first.study.records, what), _merged(second.study.records, what)
        found += [(key, mine.get(key, "–"), its.get(key, "–")) for key in sorted({*mine, *its})]
    return [entry for entry in found if entry[1] != entry[2]]


def _merged(records: tuple[RunRecord, ...], what: str) -> Mapping[str, str]:
    """Map each name to its value in the records. Join different values with "or"."""
    values: dict[str, list[str]] = {}
    for record in records:
        for key, value in (getattr(record.environment, what) if record.environment else {}).items():
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: " or ".join(found) for key, found in values.items()}


def _pair(name: str, first: Shown | None, second: Shown | None) -> Pair:
    if not first or not second:
        return Pair(name, first, second, None, "only in one study")
    if not first.row.is_ok or not second.row.is_ok:
        return Pair(name, first, second, None, "no valid result in at least one study")
    if first.row.work_class != second.row.work_class:
        works = (shown.record.work_class for shown in (first, second))
        mine, its = (work.model_dump(exclude={"data"}) if work else {} for work in works)
        fields = [field.replace("_", " ") for field in mine if field in its and mine[field] != its[field]]
        return Pair(name, first, second, None, f"different workload: {', '.join(fields) or 'unknown'}")
    if "cpu" in (first.record.device, second.record.device) and first.record.device != second.record.device:
        return Pair(name, first, second, None, "CPU and GPU results are not comparable")
    speed, other_speed = first.row.tokens_per_second_per_device, second.row.tokens_per_second_per_device
    if not speed or not other_speed:
        return Pair(name, first, second, None, "no timed step in at least one study")
    is_equal = first.spread and second.spread and first.spread.overlaps(second.spread)
    return Pair(name, first, second, other_speed / speed, "equal within the spread" if is_equal else "")
