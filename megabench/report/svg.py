"""Helpers that draw inline SVG pictures.

Widths are in percent and heights in pixels, so that text has the same size on every screen. CSS classes set the
colors; the page's style sheet defines the colors of the light, dark and print modes.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup, escape


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an SVG element.

    The argument `class_` becomes the attribute class, and `stroke_width` becomes stroke-width. Attributes with
    the value None are left out.
    """
    given = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _value(value))
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(escape(child) for child in children)
    return Markup("<{}{}>{}</{}>").format(Markup(name), given, inner, Markup(name))


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def percent(share: float) -> str:
    """Format a fraction of the width as a percentage."""
    return f"{100 * share:.2f}%"


def picture(
    slug: str,
    title: str,
    description: str,
    height: float,
    *children: object,
    class_: str = "",
    full_width: float | None = None,
) -> Markup:
    """Return a picture that fills the available width, with a title and a description for screen readers.

    A picture drawn in pixels gives its `full_width` and is scaled down if the available width is smaller.
    """
    return tag(
        "svg",
        tag("title", title, id=f"{slug}-title"),
        tag("desc", description, id=f"{slug}-desc"),
        *children,
        class_=f"chart {class_}".strip(),
        role="img",
        aria_labelledby=f"{slug}-title {slug}-desc",
        width="100%",
        height=height,
        viewBox=f"0 0 {full_width:g} {height:g}" if full_width else None,
    )


def text(words: object, x: object, y: float, class_: str = "", anchor: str | None = None, dx: float = 0) -> Markup:
    """Return a line of text at `x` (percent or pixels) and `y` (pixels), shifted right by `dx` pixels."""
    return tag("text", words, x=x, y=y, dx=dx or None, class_=class_ or None, text_anchor=anchor)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return about `most` or fewer round numbers between `low` and `high`, both inclusive."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(multiple * power for multiple in (1, 2, 2.5, 5, 10) if multiple * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_words(ticks: Sequence[float]) -> list[str]:
    """Format the numbers of an axis with as few decimals as represent all of them, such as 1,500 or 12.575."""
    for decimals in range(8):
        words = [f"{tick:,.{decimals}f}" for tick in ticks]
        if all(
            abs(float(word.replace(",", "")) - tick) < 1e-9 + 1e-6 * abs(tick)
            for word, tick in zip(words, ticks, strict=True)
        ):
            break
    return words


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions close to `wanted`, in the same order and at least `gap` apart.

    The positions lie between `low` and `high` if the range is large enough.
    """
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    places = dict.fromkeys(order, low)
    below = low - gap
    for number in order:
        below = places[number] = max(wanted[number], below + gap)
    above = high + gap
    for number in reversed(order):
        above = places[number] = min(places[number], above - gap)
    return [places[number] for number in range(len(wanted))]


def clip(words: str, most: int) -> str:
    """Shorten a text of more than `most` letters by replacing its middle with an ellipsis."""
    if len(words) <= most:
        return words
    head = (most - 1) * 2 // 3
    return f"{words[:head]}…{words[len(words) - (most - 1 - head) :]}"
