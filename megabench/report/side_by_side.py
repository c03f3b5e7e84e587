"""Two studies beside each other: yesterday and today, one kind of GPU and another."""

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from megabench.record import RunRecord
from megabench.report import bar_charts
from megabench.report.bar_charts import Strip
from megabench.report.trials import Shown, StudyView


@dataclass(frozen=True)
class Pair:
    """A trial of the first study and its namesake in the second; `change` is the second's speed over the first's.

    `remark` says why there is no change to give, or whether it is more than the spread.
    """

    name: str
    first: Shown | None
    second: Shown | None
    change: float | None
    remark: str


def pairs_of(first: StudyView, second: StudyView) -> list[Pair]:
    """Every trial of either study, those of the first in their order."""
    mine = {trial.name: trial for trial in first.trials}
    its = {trial.name: trial for trial in second.trials}
    return [_pair(name, mine.get(name), its.get(name)) for name in dict.fromkeys([*mine, *its])]


def comparison(pairs: list[Pair], names: tuple[str, str]) -> str:
    """What the pairs say, in a sentence."""
    told = [pair for pair in pairs if pair.change is not None]
    if not told:
        return "No trial of one study can be compared with one of the other: names or work differ."
    clear = [pair for pair in told if not pair.remark]
    faster = [pair for pair in clear if pair.change and pair.change > 1]
    num_equal = len(told) - len(clear)
    counts = f"{len(faster)} faster, {len(clear) - len(faster)} slower, {num_equal} equal within the spread"
    changes = [pair.change for pair in told if pair.change]
    reach = f"{min(changes):.2f} to {max(changes):.2f} ×" if len(changes) > 1 else f"{changes[0]:.2f} ×"
    of = "trial that both have" if len(told) == 1 else "trials that both have"
    return f"{names[1]} against {names[0]}, {len(told)} {of}: {reach} the speed per device ({counts})."


def draw_pairs(slug: str, pairs: list[Pair], names: tuple[str, str], device: str) -> Markup:
    """Two bars for each trial that can be compared, the first study's above the second's."""
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
    """Machine, versions and environment variables that are not the same in both studies."""
    found = [("machine", first.machine, second.machine)]
    for what in ("versions", "variables"):
        mine, its = _merged(first.study.records, what), _merged(second.study.records, what)
        found += [(key, mine.get(key, "–"), its.get(key, "–")) for key in sorted({*mine, *its})]
    return [entry for entry in found if entry[1] != entry[2]]


def _merged(records: tuple[RunRecord, ...], what: str) -> Mapping[str, str]:
    """The values of all records by name; several as "a or b"."""
    values: dict[str, list[str]] = {}
    for record in records:
        for key, value in (getattr(record.environment, what) if record.environment else {}).items():
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: " or ".join(found) for key, found in values.items()}


def _pair(name: str, first: Shown | None, second: Shown | None) -> Pair:
    if not first or not second:
        return Pair(name, first, second, None, "in one study alone")
    if not first.row.is_ok or not second.row.is_ok:
        return Pair(name, first, second, None, "no result in both")
    if first.row.work_class != second.row.work_class:
        return Pair(name, first, second, None, f"not the same work: {_differing(first.record, second.record)}")
    if "cpu" in (first.record.device, second.record.device) and first.record.device != second.record.device:
        return Pair(name, first, second, None, "a CPU against a GPU says nothing")
    mine, its = first.row.tokens_per_second_per_device, second.row.tokens_per_second_per_device
    if not mine or not its:
        return Pair(name, first, second, None, "no step was timed")
    is_equal = first.spread and second.spread and first.spread.overlaps(second.spread)
    return Pair(name, first, second, its / mine, "equal within the spread" if is_equal else "")


def _differing(first: RunRecord, second: RunRecord) -> str:
    mine, its = (record.work_class.model_dump() if record.work_class else {} for record in (first, second))
    fields = [field for field in mine if field in its and mine[field] != its[field] and field != "data"]
    return ", ".join(field.replace("_", " ") for field in fields) or "not known"
