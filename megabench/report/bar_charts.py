"""Charts with one horizontal strip per trial: the trial name, a mark drawn to scale, and the value as text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from megabench.report.svg import clip, nice_ticks, percent, picture, tag, text, tick_words
from megabench.study.verdict import Spread

_MARK_WIDTH = 0.66  # width of the bars as a fraction of the picture width; the rest shows the values as text
# pixels of a row: baseline of the name, top and height of the bar, space below
_NAME, _TOP, _MARK, _GAP = 15, 21, 18, 15
_PITCH = _TOP + _MARK + _GAP
_COLUMN = _MARK + 8
_AXIS = 30
_LONGEST = 34  # maximum number of letters of a trial name on a phone screen

Segment = tuple[str, float]  # (label, value)


@dataclass(frozen=True)
class Strip:
    """One trial in a chart: its name, its value as text, and the CSS class that sets the color of its mark."""

    name: str
    figure: str
    class_: str
    value: float = 0.0
    spread: Spread | None = None
    values: Sequence[float] = ()
    segments: Sequence[Segment] = field(default=())


def bars(slug: str, title: str, description: str, strips: Sequence[Strip], unit: str) -> Markup:
    """Draw one bar per strip, starting at zero, with the spread as a line from the low to the high value."""
    top = max([strip.value for strip in strips] + [strip.spread.high for strip in strips if strip.spread])
    marks = []
    for strip in strips:
        mark = [tag("rect", x=0, y=0, width=_at(strip.value, top), height=_MARK, rx=2, class_=f"bar {strip.class_}")]
        if spread := strip.spread:
            low, high, middle = _at(spread.low, top), _at(spread.high, top), _MARK / 2
            mark += [tag("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker")]
            mark += [tag("line", x1=x, x2=x, y1=middle - 4, y2=middle + 4, class_="whisker") for x in (low, high)]
        end = max(strip.value, strip.spread.high if strip.spread else 0.0)
        mark.append(text(strip.figure, _at(end, top), 14, "figure", dx=7))
        marks.append(Markup("").join(mark))
    return _drawn(slug, title, description, strips, marks, (0, top), unit)


def dots(slug: str, title: str, description: str, strips: Sequence[Strip], unit: str) -> Markup:
    """Draw one dot per value of a strip and a vertical line at the median."""
    everything = [value for strip in strips for value in strip.values]
    low, high = min(everything), max(everything)
    margin = (high - low) * 0.05 or high * 0.05 or 1.0
    low, high = max(0.0, low - margin), high + margin
    marks = []
    for strip in strips:
        mark = [tag("line", x1=0, x2=percent(_MARK_WIDTH), y1=_MARK / 2, y2=_MARK / 2, class_="grid")]
        mark += [
            tag("circle", cx=_at(value - low, high - low), cy=_MARK / 2, r=4, class_=f"dot {strip.class_}")
            for value in strip.values
        ]
        middle = _at(strip.value - low, high - low)
        mark.append(tag("line", x1=middle, x2=middle, y1=-1, y2=_MARK + 1, class_="median"))
        mark.append(text(strip.figure, percent(_MARK_WIDTH), 14, "figure", dx=10))
        marks.append(Markup("").join(mark))
    return _drawn(slug, title, description, strips, marks, (low, high), unit)


def columns(slug: str, title: str, description: str, strips: Sequence[Strip], top: float) -> Markup:
    """Draw one small column per value of a strip, such as the memory of a rank.

    A column of full height represents the value `top`.
    """
    marks = []
    for strip in strips:
        width = _MARK_WIDTH / len(strip.values)
        gap = 0.15 if len(strip.values) <= 64 else 0.0
        mark = [tag("rect", x=0, y=0, width=percent(_MARK_WIDTH), height=_COLUMN, class_="track")]
        for number, value in enumerate(strip.values):
            height = _COLUMN * value / top
            column = {"x": percent(width * (number + gap / 2)), "width": percent(width * (1 - gap))}
            mark.append(tag("rect", **column, y=_COLUMN - height, height=height, class_=f"bar {strip.class_}"))
        mark.append(text(strip.figure, percent(_MARK_WIDTH), 14, "figure", dx=10))
        marks.append(Markup("").join(mark))
    return _drawn(slug, title, description, strips, marks, None, "")


def stacks(
    slug: str, title: str, description: str, strips: Sequence[Strip], classes: dict[str, str], unit: str
) -> Markup:
    """Draw stacked bars, starting at zero. `classes` maps each segment label to the CSS class of its color.

    A segment that is wide enough shows its percentage of the bar.
    """
    top = max(sum(amount for _, amount in strip.segments) for strip in strips)
    marks = []
    for strip in strips:
        mark, start = [], 0.0
        total = sum(amount for _, amount in strip.segments)
        for what, amount in strip.segments:
            width, x = _at(amount, top), _at(start, top)
            words = tag("title", f"{what}: {amount:.3g} {unit}, {amount / total:.0%}")
            mark.append(tag("rect", words, x=x, y=0, width=width, height=_MARK, class_=f"segment {classes[what]}"))
            if amount / top > 0.12:
                mark.append(text(f"{amount / total:.0%}", _at(start + amount / 2, top), 13, "inside", "middle"))
            start += amount
        mark.append(text(strip.figure, _at(total, top), 14, "figure", dx=7))
        marks.append(Markup("").join(mark))
    return _drawn(slug, title, description, strips, marks, (0, top), unit)


def _at(value: float, top: float) -> str:
    return percent(_MARK_WIDTH * value / top)


def _drawn(
    slug: str,
    title: str,
    description: str,
    strips: Sequence[Strip],
    marks: Sequence[Markup],
    scale: tuple[float, float] | None,
    unit: str,
) -> Markup:
    """Draw the strips below each other, with an axis below the last strip if `scale` is given."""
    height = len(strips) * _PITCH
    parts = _axis(*scale, height, unit) if scale else []
    for number, (strip, mark) in enumerate(zip(strips, marks, strict=True)):
        y = number * _PITCH
        # x is in percent of the nearest <svg>, so each strip is a separate <svg>
        name = text(clip(strip.name, _LONGEST), 0, y + _NAME, "name")
        parts.append(tag("g", tag("title", f"{strip.name}: {strip.figure}"), name))
        parts.append(tag("svg", mark, x=0, y=y + _TOP, width="100%", height=_MARK, overflow="visible"))
    return picture(slug, title, description, height + (_AXIS if scale else 0), *parts)


def _axis(low: float, high: float, height: float, unit: str) -> list[Markup]:
    parts = []
    ticks = nice_ticks(low, high, 4)
    for tick, words in zip(ticks, tick_words(ticks), strict=True):
        x = _at(tick - low, high - low)
        parts.append(tag("line", x1=x, x2=x, y1=0, y2=height, class_="grid"))
        parts.append(text(words, x, height + 14, "tick", "start" if tick == low == 0 else "middle"))
    parts.append(text(unit, "100%", height + 14, "tick", "end"))
    return parts
