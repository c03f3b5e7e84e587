"""Say on which networks layouts are faster than ZeRO-3, as sentences and as tables. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megabench.study.crossover import Crossing, Crossover, Place, Work, crossings
from megabench.study.verdict import listed

_MOST_NAMED = 4  # a sentence with more combinations is hard to read


@dataclass(frozen=True)
class AnswerTable:
    """A table that belongs to an answer: a title, column headings, and rows of cells."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def crossover_headline(found: Crossover) -> str:
    """Say on which networks the layout that is best on slow networks is faster than the baseline, in one sentence."""
    if not found.baselines:
        return "Not known: no trial trains with ZeRO-3 or FSDP2."
    method = _best_on_slow_networks(found)
    if method is None:
        return f"Not known: no network has a result of a layout and one of {baseline_name(found, 'or')}."
    if all(ratio <= 1 for name in found.methods for work in found.works for _, ratio in found.points(work, name)):
        return f"On no measured network is a layout faster than {baseline_name(found)}."
    return _sentence(found, method)


def crossover_particulars(found: Crossover) -> list[str]:
    """Return sentences about the other layouts, the predicted crossings, the errors, and what was not measured."""
    best = _best_on_slow_networks(found)
    said = [_sentence(found, name) for name in found.methods if name != best and _has_points(found, name)]
    if best:
        said += _predicted_crossings(found, best)
    errors = [error for each in found.errors for error in each.of_trials]
    if errors:
        mean = sum(map(abs, errors)) / len(errors)
        said.append(f"Predicted step times of {len(errors)} trials have a mean error of {mean:.1%}.")
    if missing := _not_measured(found):
        said.append(missing)
    if found.num_left_out:
        trials = f"{found.num_left_out} trial{'s' * (found.num_left_out > 1)}"
        said.append(f"Left out: {trials} on another number or kind of devices.")
    return said


def crossover_tables(found: Crossover) -> tuple[AnswerTable, ...]:
    """Return the table of all points, and the table of the planner's errors if there are predictions."""
    tables = [_points_table(found)]
    if errors := found.errors:
        rows = tuple(
            (each.place.label, str(len(each.of_trials)), f"{each.mean:.1%}", f"{max(each.of_trials, key=abs):+.1%}")
            for each in errors
        )
        heads = (f"network, per {found.unit}", "trials", "mean error", "largest error")
        tables.append(AnswerTable("Errors of the predicted step times", heads, rows))
    return tuple(tables)


def baseline_name(found: Crossover, word: str = "and") -> str:
    """Return the names of the methods that shard the weights: "ZeRO-3 and FSDP2"."""
    return listed(found.baselines).replace(" and ", f" {word} ")


def work_name(found: Crossover, work: Work) -> str:
    """Return what distinguishes the work from the other work of the study: "16 sequences a step"."""
    if len({other.global_batch for other in found.works}) == len(found.works):
        return f"{work.global_batch} sequences a step"
    return f"{work.global_batch} × {work.seq_length} tokens a step of {work.model} in {work.precision}"


def _best_on_slow_networks(found: Crossover) -> str | None:
    """Return the layout with the largest advantage on the slowest network with a point."""
    starts = [
        (points[0], name) for name in found.methods for work in found.works if (points := found.points(work, name))
    ]
    slowest = min((rate for (rate, _), _ in starts), default=None)
    return max(((ratio, name) for (rate, ratio), name in starts if rate == slowest), default=(0.0, None))[1]


def _has_points(found: Crossover, method: str) -> bool:
    return any(found.points(work, method) for work in found.works)


def _sentence(found: Crossover, method: str) -> str:
    """Say on which networks a layout is faster than the baseline, for all work."""
    places = [(_where(found, work, method), work) for work in found.works]
    if len({where for where, _ in places}) == 1:
        where, of = places[0][0], f" at {_works(found, found.works)}" if len(found.works) > 1 else ""
        if where.startswith(("below", "above")):
            return f"{where[0].upper()}{where[1:]}, {method} is faster than {baseline_name(found)}{of}."
        return f"{method} is faster than {baseline_name(found)} {where}{of}."
    return f"{method} is faster than {baseline_name(found)} {_by_work(found, places)}."


def _by_work(found: Crossover, places: Sequence[tuple[str, Work]]) -> str:
    """Return the places with their work, and equal places of several work once."""
    groups = [(where, [work for _, work in same]) for where, same in groupby(places, key=lambda place: place[0])]
    return "; ".join(f"{where} at {_works(found, works)}" for where, works in groups)


def _works(found: Crossover, works: Sequence[Work]) -> str:
    names = [work_name(found, work) for work in works]
    unit = " sequences a step"
    return listed([name.removesuffix(unit) for name in names[:-1]] + names[-1:])


def _where(found: Crossover, work: Work, method: str) -> str:
    """Return on which networks a layout is faster than the baseline: "below about 4.2 GB/s per GPU"."""
    points = found.points(work, method)
    if not points:
        return "on networks that were not measured"
    ratios, crossed = [ratio for _, ratio in points], crossings(points)
    if not crossed:
        alone = f" ({points[0][0]:.3g} GB/s per {found.unit} alone)" if len(points) == 1 else ""
        return f"on {'every' if min(ratios) > 1 else 'no'} measured network{alone}"
    return listed([_at(found, work, method, crossing) for crossing in crossed])


def _at(found: Crossover, work: Work, method: str, crossing: Crossing) -> str:
    side = "below" if crossing.is_faster_below else "above"
    if crossing.at:
        return f"{side} about {crossing.at:.2g} GB/s per {found.unit}"
    predicted = [
        other.at
        for other in crossings(found.curve(work, method))
        if other.at and crossing.low < other.at < crossing.high and other.is_faster_below == crossing.is_faster_below
    ]
    guess = f" ({predicted[0]:.2g} is predicted)" if predicted else ""
    return f"{side} some bandwidth between {crossing.low:.3g} and {crossing.high:.3g} GB/s per {found.unit}{guess}"


def _predicted_crossings(found: Crossover, method: str) -> list[str]:
    """Say where the predicted curves of a layout cross the baseline's, between the slowest network and 100 GB/s."""
    places: list[tuple[str, Work]] = []
    for work in found.works:
        if not (curve := found.curve(work, method)):
            continue
        sides = [f"{'below' if one.is_faster_below else 'above'} {one.at:.2g}" for one in crossings(curve) if one.at]
        always = "on all" if curve[0][1] > 1 else "on none"
        where = f"{listed(sides)} GB/s per {found.unit}" if sides else f"{always} of these networks"
        places.append((where, work))
    if not places:
        return []
    where = _by_work(found, places)
    return [f"From the slowest network to 100 GB/s per {found.unit}, {method} is predicted to be faster {where}."]


def _not_measured(found: Crossover) -> str | None:
    """Say which combinations of work, method and network have no result, and what is predicted for them."""
    cells = found.not_measured
    if not cells:
        return None
    predicted = [found.predicted_seconds(*cell) for cell in cells]
    known = [seconds for seconds in predicted if seconds]
    if len(cells) > _MOST_NAMED:
        steps = f"; their steps are predicted to take {min(known):.2g} to {max(known):.3g} s" if known else ""
        total = len(found.measured) + len(cells)
        return (
            f"{len(cells)} of {total} combinations of layout, batch and network have no result (– in the table){steps}."
        )
    names = [
        f"{method} at {work_name(found, work)} and {place.label}" + (f" (predicted {seconds:.3g} s)" if seconds else "")
        for (work, method, place), seconds in zip(cells, predicted, strict=True)
    ]
    return f"Without a result: {listed(names)}."


def _points_table(found: Crossover) -> AnswerTable:
    rows = []
    for work in found.works:
        for place in found.places:
            cells = [_ratio_words(found, work, name, place) for name in found.methods]
            rows.append((work_name(found, work), place.label, _baseline_words(found, work, place), *cells))
    title = f"Throughput relative to the fastest trial with {baseline_name(found, 'or')}"
    title += "; in brackets, as predicted" * any("[" in cell for row in rows for cell in row)
    heads = (
        "work",
        f"network, per {found.unit}",
        f"fastest {baseline_name(found, 'or')}",
        *(f"{m}, ×" for m in found.methods),
    )
    return AnswerTable(title, heads, tuple(rows))


def _ratio_words(found: Crossover, work: Work, method: str, place: Place) -> str:
    measured, predicted = found.ratio(work, method, place), found.predicted_ratio(work, method, place)
    return _with_prediction(f"{measured:.2f}" if measured else "–", f"{predicted:.2f}" if predicted else None)


def _baseline_words(found: Crossover, work: Work, place: Place) -> str:
    row = found.fastest_baseline(work, place)
    predicted = [seconds for name in found.baselines if (seconds := found.predicted_seconds(work, name, place))]
    name = next((name for name in found.baselines if found.measured.get((work, name, place)) is row), "") if row else ""
    words = f"{name}, {row.step_seconds:.3g} s" if row and row.step_seconds else "–"
    return _with_prediction(words, f"{min(predicted):.3g} s" if predicted else None)


def _with_prediction(measured: str, predicted: str | None) -> str:
    return f"{measured} [{predicted}]" if predicted else measured
