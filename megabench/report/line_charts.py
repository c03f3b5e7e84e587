"""Line charts: losses, relative differences, and throughput over the number of GPUs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from megabench.report.svg import nice_ticks, percent, picture, spread_apart, tag, text, tick_words

_HEIGHT, _ABOVE, _BELOW = 230, 12, 40
_MOST_POINTS = 600
_SHADES = 7  # number of line colors in the style sheet; further lines differ by their dash pattern

Point = tuple[float, float | None]
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Line:
    """The line of a trial: the letter at its end, the trial number that selects color and dashes, and the points.

    A value of None interrupts the line. A line with `guide`, which is its CSS class, belongs to no trial.
    """

    letter: str
    number: int
    points: Sequence[Point]
    guide: str = ""


def line_classes(number: int) -> str:
    """Return the CSS classes that set the color and the dash pattern of the line of trial `number`."""
    return f"line shade{number % _SHADES} dash{number // _SHADES % 3}"


@dataclass(frozen=True)
class Limit:
    """A horizontal line with a label."""

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
    """Draw lines within `y_range`. Values outside `y_range` are clipped. `is_log` selects a logarithmic axis.

    `with_dots` is for trials with a single point: draw the point as a dot next to the letter of the trial.
    """
    low, high = y_range
    xs = [x for line in given for x, _ in line.points]
    left, right = min(xs), max(xs)
    margin = (right - left) * 0.05 if with_dots else 0
    left, right = (left - margin, right + margin) if right > left else (left - 1, right + 1)

    def across(x: float) -> float:
        return (x - left) / (right - left)

    def down(value: float) -> float:
        position = _log(value, low) - _log(low, low) if is_log else value - low
        span = _log(high, low) - _log(low, low) if is_log else high - low
        return _ABOVE + _HEIGHT * (1 - position / span)

    ticks = _decades(low, high) if is_log else nice_ticks(low, high)
    words = [f"{tick:.0e}" for tick in ticks] if is_log else tick_words(ticks)
    parts = [level(down(tick), word) for tick, word in zip(ticks, words, strict=True)]
    whole = sorted(set(xs)) if with_dots else [tick for tick in nice_ticks(left, right) if tick == int(tick)]
    parts += [text(f"{tick:,.0f}", percent(across(tick)), _ABOVE + _HEIGHT + 17, "tick", "middle") for tick in whole]
    parts.append(text(x_label, "50%", _ABOVE + _HEIGHT + 34, "tick", "middle"))
    if limit and low <= limit.value <= high:
        y = down(limit.value)
        parts.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="limit"))
        parts.append(text(limit.words, 4, y - 5, "tick"))
    classes = [f"line {line.guide}" if line.guide else line_classes(line.number) for line in given]
    paths = [(line.points, class_) for line, class_ in zip(given, classes, strict=True)]
    parts.append(curves(paths, across, down, _ABOVE, _HEIGHT))
    trials = [line for line in given if not line.guide]
    if with_dots:
        for line in trials:
            (x, value) = _last(line)
            parts.append(tag("circle", cx=percent(across(x)), cy=down(value), r=4, class_=_shade("dot", line)))
            parts.append(text(line.letter, percent(across(x)), down(value) + 4, _shade("letter", line), dx=8))
    else:
        wanted = [min(max(down(_last(line)[1]), _ABOVE), _ABOVE + _HEIGHT) for line in trials]
        for line, at, place in zip(trials, wanted, spread_apart(wanted, 14, _ABOVE, _ABOVE + _HEIGHT), strict=True):
            parts.append(tag("svg", _leader(line, at, place), x="100%", y=0, width=1, height=1, overflow="visible"))
    return picture(slug, title, description, _ABOVE + _HEIGHT + _BELOW, *parts, class_="plot")


def _log(value: float, least: float) -> float:
    return math.log10(max(value, least))


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, (last - first) // 5)
    return [10.0**power for power in range(first, last + 1, step)]


def level(y: float, words: str, at_right: bool = False) -> Markup:
    """Draw a horizontal grid line with its value at the left, or at the right."""
    value = text(words, "100%", y + 4, "tick", dx=6) if at_right else text(words, 0, y + 4, "tick", "end", dx=-6)
    return tag("line", x1=0, x2="100%", y1=y, y2=y, class_="grid") + value


def curves(
    given: Sequence[tuple[Sequence[Point], str]], across: Scale, down: Scale, above: float, height: float
) -> Markup:
    """Draw lines of points with their CSS classes in a nested picture that stretches to the full width.

    `across` returns a fraction of the width, and `down` pixels between `above` and `above + height`. The coordinates of
    SVG paths cannot be percentages.
    """
    paths = []
    for points, class_ in given:
        stride = max(1, len(points) // _MOST_POINTS)
        steps, pen_down = [], False
        for x, value in points[::stride]:
            if value is not None:
                steps.append(f"{'L' if pen_down else 'M'}{1000 * across(x):.1f} {down(value) - above:.2f}")
            pen_down = value is not None
        paths.append(tag("path", d="".join(steps), class_=class_))
    view = f"0 0 1000 {height}"
    return tag("svg", *paths, x=0, y=above, width="100%", height=height, viewBox=view, preserveAspectRatio="none")


def _last(line: Line) -> tuple[float, float]:
    known = [(x, value) for x, value in line.points if value is not None]
    return known[-1] if known else (line.points[-1][0], 0.0)


def _shade(what: str, line: Line) -> str:
    return f"{what} shade{line.number % _SHADES}"


def _leader(line: Line, at: float, place: float) -> Markup:
    """Draw the letter next to the end of a line, and a thin line that connects both."""
    letter = text(line.letter, 14, place + 4, _shade("letter", line))
    return tag("line", x1=1, x2=11, y1=at, y2=place, class_=_shade("leader", line)) + letter
