"""Sentences about a sweep: engines and layouts at equal settings, and what a micro-batch or a precision brings."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from megabench.record import RunRecord
from megabench.specs.registry import ENGINES_AND_PROGRAMS
from megabench.study.summary import Row, runs_by_trial
from megabench.study.verdict import listed

_LEAST_SHARE = 2 / 3  # of the trials; a study with fewer repeated layouts mainly compares layouts
_SMALL_GAIN = 1.05


@dataclass(frozen=True, order=True)
class _Point:
    """A value of the settings that a sweep varies."""

    precision: str
    micro_batch: int


_Points = Mapping[_Point, Row]
_Setup = tuple[object, object]  # (the work of a token and of a step, the engine with its options, layout and hosts)
Key = TypeVar("Key")


def is_sweep(good: Sequence[Row], records: Sequence[RunRecord]) -> bool:
    """Return whether most trials with a result repeat an engine and layout with another micro-batch or precision."""
    repeated = sum(len(rows) for rows in _points(good, records).values() if len(rows) > 1)
    return repeated > _LEAST_SHARE * len(good)


def sweep_sentences(good: Sequence[Row], records: Sequence[RunRecord], reference: str) -> list[str]:
    """Compare the engines and layouts at equal settings, and say what each varied setting brings, a sentence each.

    `good` has the trials with a result, fastest first. Speeds in different precisions are compared as throughput.
    """
    points = _points(good, records)
    by_trial = runs_by_trial(records)
    # the name of an engine and layout is "ZeRO-2", or the name of a trial if several have that name
    setups = {key: setup_name(by_trial[next(iter(rows.values())).trial][0]) for key, rows in points.items()}
    names = unless_repeated(setups, lambda key: next(iter(points[key].values())).trial)
    mine = next(
        (key for key, rows in points.items() if any(row.trial == reference for row in rows.values())),
        next(iter(points)),
    )
    compared = _compared(mine, points, names)
    return [
        *([compared] if compared else []),
        *_micro_batch_gains(points, names),
        *_precision_gains(points, names),
    ]


def _compared(reference: _Setup, points: Mapping[_Setup, _Points], names: Mapping[_Setup, str]) -> str:
    """Compare the engines and layouts of equal work with that of the reference, at the settings that both ran with."""
    parts, ratios = [], []
    mine = points[reference]
    others = {key: rows for key, rows in points.items() if key != reference and key[0] == reference[0]}
    common = {key: sorted(set(rows) & set(mine)) for key, rows in others.items()}
    words = _point_words({point for its in common.values() for point in its})
    for key in sorted((key for key, its in common.items() if its), key=names.__getitem__):
        found = [points[key][point].speed / mine[point].speed for point in common[key]]
        places = [f"{ratio:.2f} ×{words[point]}" for ratio, point in zip(found, common[key], strict=True)]
        parts.append((names[key], places))
        ratios += found
    if not parts:
        return ""
    name, is_zero = names[reference], any(row.zero_stage for row in mine.values())
    lead, verb, of = "", "reaches", f" the throughput of {name}"
    if min(ratios) > 1:
        lead = f"{name} brings nothing here: " if is_zero else f"{name} is slower than all others: "
        verb, of = "is", " as fast"
    elif max(ratios) < 1:
        lead, of = f"Nothing is as fast as {name}: ", " its throughput"
    (first, places), *more = parts
    places[0] = places[0].replace(" ×", f" ×{of}", 1)
    said = [f"{first} {verb} {listed(places)}", *(f"{other} {listed(its)}" for other, its in more)]
    return f"{lead}{'; '.join(said)}."


def _point_words(points: Collection[_Point]) -> dict[_Point, str]:
    """Return " in fp16 at micro-batch 4" for each point, with only what varies between the points."""
    several_precisions = len({point.precision for point in points}) > 1
    several_batches = len({point.micro_batch for point in points}) > 1
    return {
        point: f" in {point.precision}" * several_precisions + f" at micro-batch {point.micro_batch}" * several_batches
        for point in points
    }


def _micro_batch_gains(points: Mapping[_Setup, _Points], names: Mapping[_Setup, str]) -> Iterator[str]:
    """Say what a larger micro-batch brings each engine and layout, in one sentence."""
    gains = []
    for key, rows in points.items():
        for _, group in groupby(sorted(rows), key=lambda point: point.precision):
            batches = list(group)
            if len(batches) > 1:
                first, best = batches[0], max(batches[1:], key=lambda point: rows[point].speed)
                ratio = rows[best].speed / rows[first].speed
                gains.append((ratio, f"{names[key]} gains {ratio:.2f} ×", first.micro_batch, best.micro_batch))
    if gains:
        helps = max(ratio for ratio, *_ in gains) > _SMALL_GAIN
        lead = "What helps is the micro-batch" if helps else "The micro-batch changes little"
        yield f"{lead}: {listed([f'{words} from {first} to {best}' for _, words, first, best in gains])}."


def _precision_gains(points: Mapping[_Setup, _Points], names: Mapping[_Setup, str]) -> Iterator[str]:
    """Say how much faster each precision is than fp32, or than the last one without fp32, in one sentence each."""
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key, rows in points.items():
        for _, group in groupby(sorted(rows, key=lambda point: point.micro_batch), key=lambda point: point.micro_batch):
            mine = {point.precision: rows[point] for point in group}
            base = "fp32" if "fp32" in mine else max(mine)
            for precision in sorted(set(mine) - {base}):
                ratio = mine[precision].speed / mine[base].speed
                pairs.setdefault((precision, base), []).append((f"{ratio:.2f} ×", names[key]))
    for (precision, base), ((ratio_words, name), *others) in pairs.items():
        more = [f"{words} with {other}" for words, other in others]
        yield f"{precision} is {listed([f'{ratio_words} as fast as {base} with {name}', *more])}."


def _points(good: Sequence[Row], records: Sequence[RunRecord]) -> dict[_Setup, dict[_Point, Row]]:
    """Return the trials with a result by engine and layout, and then by precision and micro-batch."""
    by_trial = runs_by_trial(records)
    found: dict[_Setup, dict[_Point, Row]] = {}
    for row in good:
        record = by_trial[row.trial][0]
        work = (row.model, row.seq_length, row.global_batch, row.optimizer)
        place = (row.num_hosts, row.is_emulated, row.emulated_gb_per_s, row.emulated_latency_us)
        key = (work, (row.engine, str(record.options), row.layout, place))
        found.setdefault(key, {}).setdefault(_Point(row.precision, row.micro_batch), row)
    return found


def unless_repeated(names: Mapping[Key, str], distinct: Callable[[Key], str]) -> dict[Key, str]:
    """Return the names, with the distinct name in place of each name that occurs more than once."""
    count = Counter(names.values())
    return {key: name if count[name] == 1 else distinct(key) for key, name in names.items()}


def setup_name(record: RunRecord) -> str:
    """Return the layout of a megatron run, and the name of the method of other engines: "ZeRO-2" or "DDP"."""
    spec = ENGINES_AND_PROGRAMS.get(record.engine)
    if spec is None:
        return record.engine
    sizes = {axis: size for axis, size in record.layout.model_dump().items() if size > 1}
    if len(spec.axes) > 1 and sizes:
        return "·".join(f"{axis}{size}" for axis, size in sizes.items())
    return spec.mode(record.options) or spec.title
