"""Charts of lines over a common axis: losses, differences, throughput against number of GPUs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from megabench.study.report.svg import distinct, nice_ticks, percent, picture, short, spread_apart, tag, text

_HEIGHT, _ABOVE, _BELOW = 230, 12, 40
_MOST_POINTS = 600
_SHADES = 7  # colours that the style sheet has for lines; beyond them the dashes change

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Line:
    """A trial's line: its letter at the end, its place among the trials for colour and dashes, and its points.

    None for a value breaks the line.
    """

    letter: str
    number: int
    points: Sequence[Point]
    is_guide: bool = False


def line_classes(number: int) -> str:
    """The classes that colour and dash the line of trial `number`."""
    return f"line shade{number % _SHADES} dash{number // _SHADES % 3}"


@dataclass(frozen=True)
class Limit:
    """A horizontal line with words on it."""

    value: float
    words: str


def lines(
    slug: str,
    title: str,
    description: str,
    given: Sequence[Line],
    x_label: str,
    y_range: tuple[float, float],
    is_log: bool = False,
    limit: Limit | None = None,
    with_dots: bool = False,
) -> Markup:
    """Lines within `y_range`; what leaves it is cut off at the border. `is_log` draws values by their logarithm."""
    low, high = y_range
    xs = [x for line in given for x, _ in line.points]
    left, right = min(xs), max(xs)
    margin = (right - left) * 0.03 if with_dots else 0
    left, right = (left - margin, right + margin) if right > left else (left - 1, right + 1)

    def across(x: float) -> float:
        return (x - left) / (right - left)

    def down(value: float) -> float:
        position = _log(value, low) - _log(low, low) if is_log else value - low
        span = _log(high, low) - _log(low, low) if is_log else high - low
        return _ABOVE + _HEIGHT * (1 - position / span)

    parts = _axes(nice_ticks(left, right), across, _decades(low, high) if is_log else nice_ticks(low, high), down)
    parts.append(text(x_label, "50%", _ABOVE + _HEIGHT + 34, "tick", "middle"))
    if limit and low <= limit.value <= high:
        y = down(limit.value)
        parts.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="limit"))
        parts.append(text(limit.words, 4, y - 5, "tick"))
    parts.append(_curves(given, across, down))
    ends = [_last(line) for line in given if not line.is_guide]
    if with_dots:
        for line in given:
            for x, value in line.points if not line.is_guide else ():
                if value is not None:
                    parts.append(tag("circle", cx=percent(across(x)), cy=down(value), r=4, class_=_dot(line)))
    wanted = [min(max(down(value), _ABOVE), _ABOVE + _HEIGHT) for _, value in ends]
    labelled = [line for line in given if not line.is_guide]
    for line, at, place in zip(labelled, wanted, spread_apart(wanted, 14, _ABOVE, _ABOVE + _HEIGHT), strict=True):
        parts.append(tag("svg", _leader(line, at, place), x="100%", y=0, width=1, height=1, overflow="visible"))
    return picture(slug, title, description, _ABOVE + _HEIGHT + _BELOW, *parts, class_="plot")


def _log(value: float, least: float) -> float:
    return math.log10(max(value, least))


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, (last - first) // 5)
    return [10.0**power for power in range(first, last + 1, step)]


def _axes(x_ticks: Sequence[float], across, y_ticks: Sequence[float], down) -> list[Markup]:  # type: ignore[no-untyped-def]
    parts = []
    for tick, words in zip(y_ticks, distinct(y_ticks), strict=True):
        parts.append(tag("line", x1=0, x2="100%", y1=down(tick), y2=down(tick), class_="grid"))
        parts.append(text(words, 0, down(tick) + 4, "tick", "end", dx=-6))
    for tick in x_ticks:
        if tick == int(tick):
            parts.append(text(short(tick), percent(across(tick)), _ABOVE + _HEIGHT + 17, "tick", "middle"))
    return parts


def _curves(given: Sequence[Line], across, down) -> Markup:  # type: ignore[no-untyped-def]
    """The lines in a picture of their own that is stretched to the width, which their points cannot be in percent."""
    curves = []
    for line in given:
        stride = max(1, len(line.points) // _MOST_POINTS)
        steps, pen_down = [], False
        for x, value in line.points[::stride]:
            if value is not None:
                steps.append(f"{'L' if pen_down else 'M'}{1000 * across(x):.1f} {down(value) - _ABOVE:.2f}")
            pen_down = value is not None
        class_ = "line guide" if line.is_guide else line_classes(line.number)
        curves.append(tag("path", d="".join(steps), class_=class_))
    view = f"0 0 1000 {_HEIGHT}"
    return tag("svg", *curves, x=0, y=_ABOVE, width="100%", height=_HEIGHT, viewBox=view, preserveAspectRatio="none")


def _last(line: Line) -> tuple[float, float]:
    known = [(x, value) for x, value in line.points if value is not None]
    return known[-1] if known else (line.points[-1][0], 0.0)


def _dot(line: Line) -> str:
    return f"dot shade{line.number % _SHADES}"


def _leader(line: Line, at: float, place: float) -> Markup:
    """The line's letter beside its end, and a thin line to it."""
    shade = f"shade{line.number % _SHADES}"
    return tag("line", x1=1, x2=11, y1=at, y2=place, class_=f"leader {shade}") + text(
        line.letter, 14, place + 4, f"letter {shade}"
    )
