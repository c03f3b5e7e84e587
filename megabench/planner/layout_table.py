"""Tables that fit into the terminal: as many columns as there is room for, and no cell cut. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megabench import metrics
from megabench.planner.costs import Estimate
from megabench.planner.reasons import GIB, chance_text, unmeasured_engines

UNMEASURED = "†"  # mark of what was never measured
_MOST_CHARACTERS = 120  # width of tables in files and pipes


@dataclass(frozen=True)
class Column:
    """One column of a table. Columns with `is_kept` are shown in every terminal."""

    head: str
    cells: Sequence[str]
    is_text: bool = False
    is_kept: bool = False

    @property
    def width(self) -> int:
        return max(len(text) for text in (self.head, *self.cells))


@dataclass(frozen=True)
class Training:
    """A whole training run: its number of tokens, and the price of a GPU for an hour in any currency, if known."""

    num_tokens: float = metrics.DEFAULT_TOKENS
    price_per_gpu_hour: float | None = None

    def days(self, tokens_per_second: float) -> float:
        """Return the days of an uninterrupted run."""
        return metrics.training_days(tokens_per_second, self.num_tokens)

    def price(self, tokens_per_second: float, num_gpus: int) -> float | None:
        """Return the price of the run in the currency of the GPU's price, or None if that is unknown."""
        hours = 24 * self.days(tokens_per_second)
        return None if self.price_per_gpu_hour is None else hours * num_gpus * self.price_per_gpu_hour


def print_table(console: Console, columns: Sequence[Column]) -> None:
    """Print the columns that fit into the terminal. Columns that are not kept are dropped, the last one first."""
    shown, room = list(columns), min(console.width, _MOST_CHARACTERS)
    while _width(shown) > room and (last := next((one for one in reversed(shown) if not one.is_kept), None)):
        shown.remove(last)
    table = Table(box=box.MARKDOWN)
    for column in shown:
        table.add_column(Text(column.head), justify="left" if column.is_text else "right", no_wrap=True)
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*map(Text, cells))
    # the names of layouts are longer than a very narrow terminal
    options = console.options.update(width=max(console.width, _width(shown)))
    lines = console.render_lines(table, options, pad=False)
    for line in lines:
        text = "".join(segment.text for segment in line).rstrip()
        if text:
            console.print(Text(text), soft_wrap=True)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + 3 for column in columns) + 1


def layout_columns(rows: Sequence[tuple[str, Estimate]], training: Training | None) -> list[Column]:
    """Return the columns of a table of layouts, the most important ones first. Each row has a label and a layout."""
    estimates = [estimate for _, estimate in rows]
    marks = [f" {UNMEASURED}" if unmeasured_engines([one]) else "" for one in estimates]
    labels = [label for label, _ in rows]
    columns = [
        *([Column("", labels, is_text=True, is_kept=True)] if any(labels) else []),
        Column(
            "layout",
            [f"{one.candidate.name}{mark}" for one, mark in zip(estimates, marks, strict=True)],
            is_text=True,
            is_kept=True,
        ),
        Column("tok/s/GPU", [f"{one.tokens_per_second_per_device:,.0f}" for one in estimates], is_kept=True),
    ]
    if training:
        sizes = [one.candidate.layout.world_size for one in estimates]
        columns += training_columns([training] * len(rows), [one.tokens_per_second for one in estimates], sizes)
    if any(map(chance_text, estimates)):
        columns.append(Column("fits", [chance_text(one) or "≥99%" for one in estimates]))
    columns += [
        Column("step s", [f"{one.step_seconds:.3f}" for one in estimates]),
        Column("MFU", [f"{100 * one.mfu:.1f}%" for one in estimates]),
        Column("GiB", [f"{one.memory.total / GIB:.1f}" for one in estimates]),
    ]
    bubbles = [one.parts.get("bubble", 0.0) / one.step_seconds for one in estimates]
    return [
        *columns,
        Column("bubble", [f"{100 * share:.1f}%" for share in bubbles]),
        Column("exposed communication", [_exposed(one) for one in estimates], is_text=True),
    ]


def training_columns(trainings: Sequence[Training], speeds: Sequence[float], sizes: Sequence[int]) -> list[Column]:
    """Return the columns of days and price of the rows, from their tokens/s and numbers of GPUs."""
    runs = list(zip(trainings, speeds, sizes, strict=True))
    columns = [Column("days", [f"{training.days(speed):,.1f}" for training, speed, _ in runs])]
    prices = [training.price(speed, size) for training, speed, size in runs]
    if any(price is not None for price in prices):
        columns.append(Column("price", ["" if price is None else f"{price:,.0f}" for price in prices]))
    return columns


def _exposed(estimate: Estimate) -> str:
    """Return the exposed communication by group, as shares of the step."""
    shares = {axis: seconds / estimate.step_seconds for axis, seconds in estimate.exposed.items()}
    return " ".join(f"{axis} {100 * share:.1f}%" for axis, share in shares.items() if share >= 0.0005) or "–"
