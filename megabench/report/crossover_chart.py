"""The picture of a crossover: throughput relative to ZeRO-3 over the bandwidth of the network, on two log axes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from megabench.report.chart import Chart, Figures
from megabench.report.line_charts import Scale, curves, level, line_classes
from megabench.report.svg import clip, percent, picture, spread_apart, tag, text
from megabench.report.trials import StudyView
from megabench.study.crossover import Crossover, Work, marks
from megabench.study.crossover_answer import baseline_name, crossover_tables, work_name
from megabench.study.verdict import devices_word, listed

_HEIGHT, _ABOVE, _BELOW = 340, 40, 44
_LONGEST = 18  # letters that fit to the left of the picture
_MARK_ROWS = 2  # the names of neighboring marks are at different heights
_TICKS = (1, 2, 5)
# the points of the first, second and third work, as paths around (0, 0)
_SHAPES = {
    "circles": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0Z",
    "squares": "M-4 -4H4V4H-4Z",
    "diamonds": "M0 -6L6 0L0 6L-6 0Z",
}

Point = tuple[float, float]


@dataclass(frozen=True)
class _Curve:
    """The curve of a layout with some work. `number` selects its color and its dashes, and `shape` its points."""

    name: str
    number: int
    shape: str
    predicted: Sequence[Point]
    measured: Sequence[Point]

    @property
    def points(self) -> list[Point]:
        """All points, which are (GB/s per GPU, throughput ÷ that of the baseline)."""
        return [*self.predicted, *self.measured]


def crossover_chart(view: StudyView) -> Chart | None:
    """Return the picture, or None if no layout has a point or the study asks another question."""
    if view.study.answers != "crossover" or not any(
        trial.row.is_ok and trial.row.step_seconds for trial in view.trials
    ):
        return None
    found = Crossover([trial.row for trial in view.trials], view.study.records)
    drawn = [curve for curve in _curves_of(found) if curve.points]
    if not drawn:
        return None
    baseline = baseline_name(found, "or")
    known = marks(found.device) if found.device != "cpu" else []
    table = crossover_tables(found)[0]
    title = f"Throughput relative to the fastest {baseline}, by bandwidth between {devices_word(view.device)}"
    described = "; ".join(
        f"{curve.name}: " + (", ".join(f"{y:.2f} × at {x:.3g} GB/s" for x, y in curve.measured) or "not measured")
        for curve in drawn
    )
    lines = (
        "Lines are predictions of the planner for hosts that a network of this bandwidth joins."
        if any(curve.predicted for curve in drawn)
        else "Lines connect the measured points."
    )
    names = [work_name(found, work) for work in found.works]
    shapes = listed([f"{shape} for {name}" for shape, name in zip(_SHAPES, names, strict=False)])
    words = (
        f"Above the line at 1 ×, a layout is faster than {baseline} with the best settings in this study, on the same "
        f"network and with the same batch. Points are measured{f' ({shapes})' * (len(names) > 1)}. {lines}"
        + " Dotted vertical lines are the bandwidths of known networks, from data sheets."
        * bool(known)
    )
    return Chart(
        title,
        words,
        _picture(title, described, drawn, known, found.unit),
        tuple((line_classes(curve.number), curve.name) for curve in drawn),
        Figures(table.heads, table.rows),
        is_wide=True,
    )


def _curves_of(found: Crossover) -> Iterator[_Curve]:
    """Yield a curve for each layout and work. Layouts have a color, and work has dashes and a shape of points."""
    for shade, method in enumerate(found.methods):
        for dash, work in enumerate(found.works):
            yield _Curve(
                name=_curve_name(found, method, work),
                number=shade % 7 + 7 * dash,
                shape=[*_SHAPES.values()][dash % len(_SHAPES)],
                predicted=found.curve(work, method),
                measured=found.points(work, method),
            )


def _curve_name(found: Crossover, method: str, work: Work) -> str:
    return f"{method}, {work_name(found, work)}" if len(found.works) > 1 else method


def _picture(
    title: str, description: str, drawn: Sequence[_Curve], known: Sequence[tuple[str, float]], unit: str
) -> Markup:
    xs = [x for curve in drawn for x, _ in curve.points] + [rate for _, rate in known]
    ys = [1.0, *(y for curve in drawn for _, y in curve.points)]
    left, right, low, high = min(xs), max(xs) * 1.15, min(ys) / 1.15, max(ys) * 1.15

    def across(x: float) -> float:
        return math.log(x / left) / math.log(right / left)

    def down(y: float) -> float:
        return _ABOVE + _HEIGHT * (1 - math.log(y / low) / math.log(high / low))

    parts = [level(down(tick), f"{tick:g} ×", at_right=True) for tick in _log_ticks(low, high)]
    base = _ABOVE + _HEIGHT
    parts += [text(f"{tick:g}", percent(across(tick)), base + 17, "tick", "middle") for tick in _log_ticks(left, right)]
    parts.append(text(f"GB/s per {unit}, each way", "50%", base + 36, "tick", "middle"))
    for number, (name, rate) in enumerate(sorted(known, key=lambda mark: mark[1])):
        x = percent(across(rate))
        parts.append(tag("line", x1=x, x2=x, y1=_ABOVE - 4, y2=base, class_="line guide"))
        parts.append(text(f"{name} {rate:.3g}", x, 12 + 15 * (number % _MARK_ROWS), "tick", "middle"))
    parts.append(tag("line", x1=0, x2="100%", y1=down(1), y2=down(1), class_="limit"))
    lines = [(curve.predicted or curve.measured, line_classes(curve.number)) for curve in drawn]
    parts.append(curves(lines, across, down, _ABOVE, _HEIGHT))
    for curve in drawn:
        mark = tag("path", d=curve.shape, class_=f"dot shade{curve.number % 7}")
        parts += [
            tag("svg", mark, x=percent(across(x)), y=down(y), width=1, height=1, overflow="visible")
            for x, y in curve.measured
        ]
    parts += _names(drawn, down)
    return picture("crossover", title, description, base + _BELOW, *parts, class_="plot crossover")


def _names(drawn: Sequence[_Curve], down: Scale) -> Iterator[Markup]:
    """Yield the names of the curves, left of their first points."""
    wanted = [down((curve.predicted or curve.measured)[0][1]) for curve in drawn]
    places = spread_apart(wanted, 14, _ABOVE, _ABOVE + _HEIGHT)
    for curve, at, place in zip(drawn, wanted, places, strict=True):
        shade = f"shade{curve.number % 7}"
        yield tag("line", x1=-11, x2=-2, y1=place, y2=at, class_=f"leader {shade}")
        name = clip(curve.name.removesuffix(" sequences a step"), _LONGEST)
        yield text(name, -14, place + 4, f"letter {shade}", "end")


def _log_ticks(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5 times powers of ten between `low` and `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in powers for times in _TICKS if low <= (tick := times * 10.0**power) <= high]
