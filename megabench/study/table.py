"""Print the rows of a study as Markdown tables in a terminal, with a one-line conclusion."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from megabench.record import RunRecord, WorkClass
from megabench.study.parity import is_zero3
from megabench.study.precision_verdict import precision_verdicts
from megabench.study.summary import Row, summarize
from megabench.study.verdict import best_line, by_place, decide, device_word, spreads_of

_CPU_TIMINGS = "These are CPU timings: no evidence about GPUs."


@dataclass(frozen=True)
class _Column:
    """A column. If the terminal is too narrow, columns with the highest `rank` are omitted first."""

    head: str
    cell: Callable[[Row], str]
    rank: int = 0
    is_text: bool = False


def show(console: Console, records: Sequence[RunRecord], reference: str) -> None:
    """Print one table for each work class, its best trial, and the reasons for trials without a result."""
    head = reference_name(records, reference)
    for title, group, said in _by_class(records, reference):
        _say(console, title)
        _print_table(console, group, head)
        for line in said:
            _say(console, line)
        for row in group:
            if not row.is_ok:
                _say(console, f"{row.trial} ({_status(row)}): {row.reason}")
            for warning in row.warnings:
                console.print(Text(f"WARNING {row.trial}: {warning}", style="bold red"), soft_wrap=True)
    if any(record.device == "cpu" for record in records):
        _say(console, _CPU_TIMINGS)


def markdown(records: Sequence[RunRecord], reference: str) -> str:
    """Return the tables as Markdown with all columns. The status column is omitted if all trials are ok."""
    parts = []
    for title, group, (best, *places) in _by_class(records, reference):
        columns = _columns(group, reference_name(records, reference))
        if all(_status(row) == "ok" for row in group):
            columns = [column for column in columns if column.head != "status"]
        output = StringIO()
        Console(file=output, width=10_000, color_system=None).print(_table(columns, group))
        lines = [line.rstrip() for line in output.getvalue().splitlines() if line.strip()]
        parts += [f"{title}:", "\n".join(lines), " ".join([f"{best}.", *places])]
        parts += [f"{row.trial}: {warning}." for row in group for warning in row.warnings]
    if any(record.device == "cpu" for record in records):
        parts.append(_CPU_TIMINGS)
    return "\n\n".join(parts)


def _by_class(records: Sequence[RunRecord], reference: str) -> Iterator[tuple[str, list[Row], list[str]]]:
    """Return the title, the rows and the conclusion of each work class.

    Trials without a result follow the last class.
    """
    rows = summarize(records, reference)
    head, titles, spreads = reference_name(records, reference), class_titles(records), spreads_of(records)
    groups = [(key, list(group)) for key, group in groupby(rows, key=lambda row: row.work_class)]
    if len(groups) > 1 and groups[-1][0] is None:
        (_, unplaced), (_, last) = groups.pop(), groups[-1]
        last += unplaced
    device = device_word(records)
    decisions = {work_class: decide(group, spreads, head) for work_class, group in groups}
    precisions = precision_verdicts(decisions, records, device)
    for work_class, group in groups:
        precision = precisions.get(work_class)
        said = [best_line(decisions[work_class], precision is not None), *by_place(decisions[work_class], device)]
        if precision:
            said += [precision.headline, *precision.particulars]
        yield titles.get(work_class, "no trial has a result"), group, said


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def reference_name(records: Sequence[RunRecord], reference: str) -> str:
    """Return the name of the reference in the header of a table, which is "ZeRO-3" or the name of the trial."""
    return "ZeRO-3" if any(record.trial == reference and is_zero3(record) for record in records) else reference


def class_titles(records: Sequence[RunRecord]) -> dict[str | None, str]:
    """Return a title for each work class: the work, and its difference from the other classes."""
    classes = {record.work_class.id: record for record in records if record.work_class}
    settings = {name: _settings(record.work_class) for name, record in classes.items() if record.work_class}
    shared = set.intersection(*map(set, settings.values())) if settings else set()
    titles: dict[str | None, str] = {}
    for name, record in classes.items():
        what = f"{record.model}, {record.precision}, {record.global_batch} × {record.seq_length} tokens a step"
        mine = settings[name]
        differing = [
            f"{field}={value}"
            for field, value in mine.items()
            if field in shared and any(other[field] != value for other in settings.values()) and value is not None
        ]
        titles[name] = ", ".join([what, f"{record.world_size} × {record.device}", *differing])
    return titles


def _settings(work_class: WorkClass) -> dict[str, Any]:
    """Return the properties of a work class that not every title contains, with the schedule's settings included."""
    in_every_title = {"model", "precision", "global_batch", "seq_length"}
    settings = work_class.model_dump(exclude={"schedule", "data", "fp8", *in_every_title})
    fp8 = work_class.fp8
    return (
        settings
        | {field: f"{value:g}" for field, value in work_class.schedule.items()}
        | {
            "fp8_recipe": fp8.recipe if fp8 else None,
            "num_layers_at_start_in_bf16": fp8.num_layers_at_start_in_bf16 if fp8 else 0,
            "num_layers_at_end_in_bf16": fp8.num_layers_at_end_in_bf16 if fp8 else 0,
        }
    )


def _print_table(console: Console, rows: Sequence[Row], reference: str) -> None:
    columns = _columns(rows, reference)
    left_out = []
    while _width(console, _table(columns, rows)) > console.width and any(column.rank for column in columns):
        dropped = max(columns, key=lambda column: column.rank)
        columns.remove(dropped)
        left_out.append(dropped.head)
    console.print(_table(columns, rows))
    if left_out:
        _say(console, f"columns omitted because the terminal is narrow: {', '.join(left_out)}; summary.csv has them")


def _width(console: Console, table: Table) -> int:
    """Return the width at which no cell of `table` is wrapped."""
    return Measurement.get(console, console.options.update(width=10_000), table).maximum


def _table(columns: Sequence[_Column], rows: Sequence[Row]) -> Table:
    table = Table(box=box.MARKDOWN)
    for column in columns:
        table.add_column(Text(column.head), justify="left" if column.is_text else "right", overflow="fold")
    for row in rows:
        style = "bold" if row is rows[0] and row.is_ok else "" if row.is_ok else "dim"
        table.add_row(*(Text(column.cell(row)) for column in columns), style=style)
    return table


def _columns(rows: Sequence[Row], reference: str) -> list[_Column]:
    columns = [
        _Column("trial", lambda row: row.trial, is_text=True),
        _Column("engine", lambda row: row.engine, rank=6, is_text=True),
        _Column("layout", lambda row: row.layout, rank=2, is_text=True),
        _Column("hosts", _hosts, is_text=True),
        _Column("micro-batch", lambda row: str(row.micro_batch), rank=5),
        _Column("step s", lambda row: _number(row.step_seconds, ".4g"), rank=1),
        _Column("tok/s per device", _speed),
        _Column("TFLOP/s per device", lambda row: _number(row.tflops_per_device, ".3g"), rank=4),
        _Column("MFU", lambda row: _number(row.mfu, ".1%")),
        _Column("peak GiB", lambda row: _number(row.peak_memory_gib, ".2f"), rank=3),
        _Column(f"× {reference}", lambda row: _number(row.ratio, ".2f")),
        _Column("parity", _parity, is_text=True),
        _Column("status", _status, is_text=True),
    ]
    unused = {"MFU"} if all(row.mfu is None for row in rows) else set()
    unused |= {"hosts"} if all(row.num_hosts in (None, 1) for row in rows) else set()
    return [column for column in columns if column.head not in unused]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _hosts(row: Row) -> str:
    return "–" if row.num_hosts is None else f"{row.num_hosts}{' emulated' * row.is_emulated}"


def _speed(row: Row) -> str:
    low, high = row.tokens_per_second_per_device_min, row.tokens_per_second_per_device_max
    spread = f" ({low:,.0f}–{high:,.0f})" if row.num_runs > 1 and low is not None and high is not None else ""
    return _number(row.tokens_per_second_per_device, ",.0f") + spread


def _status(row: Row) -> str:
    status = "DIVERGED" if row.status == "diverged" else row.status
    return f"{status}, {row.num_skipped_steps} steps skipped" if row.num_skipped_steps else status


def _parity(row: Row) -> str:
    difference = "" if row.max_relative_difference is None else f" {row.max_relative_difference:.1g}"
    norms = "" if row.grad_norm_difference is None else f", gradients {row.grad_norm_difference:.1g}"
    if row.parity == "equal" and row.trial == row.reference:
        return "reference"
    return {"equal": f"equal{difference}", "diverged": f"DIVERGED{difference}{norms}", "unknown": "–"}[row.parity]
