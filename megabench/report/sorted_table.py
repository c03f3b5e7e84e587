"""Table of a work class: cells with their sort values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megabench.report.parity_charts import parity_words
from megabench.report.trials import Shown, StudyView, WorkClassOfTrials


@dataclass(frozen=True)
class Cell:
    """The text of a cell and its sort value. Cells with an empty sort value come last."""

    words: str
    sort: str | float = ""


@dataclass(frozen=True)
class Head:
    """A column: its name, the function that creates a cell, and whether the cells are numbers."""

    name: str
    cell: Callable[[Shown], Cell]
    is_number: bool = True


def heads_of(group: WorkClassOfTrials, view: StudyView) -> list[Head]:
    """Return the columns of a work class. Columns without any known value are left out."""
    heads = [
        Head("trial", lambda trial: Cell(trial.name, trial.name), False),
        Head(f"tok/s per {view.device}", lambda t: _figure(t.row.tokens_per_second_per_device, ",.0f")),
        Head("spread", _spread),
        Head(f"× {view.head}", lambda trial: _figure(trial.row.ratio, ".2f")),
        Head("status", lambda trial: Cell(_status(trial), trial.row.status), False),
        Head("parity", lambda trial: Cell(parity_words(trial), trial.row.max_relative_difference or ""), False),
        Head("loss minus bf16", lambda trial: _figure(trial.row.loss_difference_from_bf16, "+.1%")),
        Head("layout", lambda trial: Cell(trial.row.layout, trial.row.layout), False),
        Head("engine", lambda trial: Cell(trial.row.engine, trial.row.engine), False),
        Head("step s", lambda trial: _figure(trial.row.step_seconds, ".4g")),
        Head("MFU", lambda trial: _figure(trial.row.mfu, ".1%")),
        Head("peak GiB", lambda trial: _figure(trial.row.peak_memory_gib, ".2f")),
        Head("micro-batch", lambda trial: _count(trial.row.micro_batch)),
        Head(f"{view.device}s" if view.device == "GPU" else "processes", lambda t: _count(t.row.world_size)),
        Head("hosts", _hosts),
        Head(f"TFLOP/s per {view.device}", lambda t: _figure(t.row.tflops_per_device, ".3g")),
    ]
    return [head for head in heads if any(head.cell(trial).words not in ("–", "not known") for trial in group.trials)]


def row_of(trial: Shown, heads: Sequence[Head]) -> list[Cell]:
    """Return the cells of a trial for the columns `heads`."""
    return [head.cell(trial) for head in heads]


def _figure(value: float | None, form: str) -> Cell:
    return Cell("–") if value is None else Cell(format(value, form), value)


def _count(value: int) -> Cell:
    return Cell(str(value), value)


def _hosts(trial: Shown) -> Cell:
    number = trial.row.num_hosts
    return Cell("–") if number is None else Cell(f"{number}{' emulated' * trial.row.is_emulated}", number)


def _spread(trial: Shown) -> Cell:
    spread = trial.spread
    return Cell(f"{spread.low:,.0f}–{spread.high:,.0f}", spread.high - spread.low) if spread else Cell("–")


def _status(trial: Shown) -> str:
    row = trial.row
    status = "DIVERGED" if row.status == "diverged" else row.status
    return f"{status}, {row.num_skipped_steps} steps skipped" if row.num_skipped_steps else status
