"""Pictures as inline SVG. Widths are in percent and heights in pixels, so that text keeps its size on every screen.

Colours are classes of the page's style sheet, which knows light, dark and paper.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup, escape


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; `class_` and `stroke_width` become class and stroke-width, and None leaves an attribute out."""
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
    """A share of the width as an attribute."""
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
    """A picture as wide as its place, with a name and a description for those who cannot see it.

    One drawn in pixels gives its `full_width`, and shrinks as a whole where there is less.
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
    """A line of text; `x` in percent or pixels, moved by `dx` pixels."""
    return tag("text", words, x=x, y=y, dx=dx or None, class_=class_ or None, text_anchor=anchor)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, both included in their range, at most about `most` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(multiple * power for multiple in (1, 2, 2.5, 5, 10) if multiple * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_words(ticks: Sequence[float]) -> list[str]:
    """The numbers of an axis, with as many decimals as tell them apart: 1,500 or 12.575."""
    for decimals in range(8):
        words = [f"{tick:,.{decimals}f}" for tick in ticks]
        if all(
            abs(float(word.replace(",", "")) - tick) < 1e-9 + 1e-6 * abs(tick)
            for word, tick in zip(words, ticks, strict=True)
        ):
            break
    return words


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted, in the same order, at least `gap` apart, between `low` and `high` where that fits."""
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
    """The words, shortened in their middle when they are longer than `most` letters."""
    if len(words) <= most:
        return words
    head = (most - 1) * 2 // 3
    return f"{words[:head]}…{words[len(words) - (most - 1 - head) :]}"
