"""Print the answer to a study's question and the table of its trials, in a terminal or as Markdown."""

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from megabench.record import RunRecord
from megabench.study.answers import answer
from megabench.study.columns import Column, StudyTable, status_words, study_table
from megabench.study.crossover_answer import AnswerTable
from megabench.study.study import Question
from megabench.study.summary import Budget, Row

_CPU_TIMINGS = "These are CPU timings: no evidence about GPUs."


def show(
    console: Console,
    records: Sequence[RunRecord],
    reference: str,
    question: Question | None = None,
    budget: Budget | None = None,
    columns: Sequence[str] = (),
    confirm: str | None = None,
) -> None:
    """Print the answer, the table of all trials, and the reasons for trials without a result.

    `question` is the kind of the answer, by default the one that the trials ask for. `columns` are keys
    of columns, by default those of the usual ones that fit in the terminal. `confirm` says how to confirm the ranking.
    Raises ColumnError for another name of a column.
    """
    table = study_table(records, reference, question, budget)
    chosen = table.choose(columns)
    found = answer(records, reference, question, budget, confirm)
    console.print(Text(found.headline, style="bold"), soft_wrap=True)
    for sentence in found.particulars:
        _say(console, f"- {sentence}")
    for extra in found.tables:
        _say(console, f"{extra.title}:")
        console.print(_answer_table(extra))
    left_out = [] if columns else _narrow(console, chosen, table.rows)
    console.print(_drawn(chosen, table.rows))
    if left_out:
        _say(console, f"columns omitted because the terminal is narrow: {', '.join(left_out)}; summary.csv has them")
    for sentence in _about_works(table):
        _say(console, sentence)
    for row in table.rows:
        if not row.is_ok:
            _say(console, f"{row.trial} ({status_words(row)}): {row.reason}")
        for warning in row.warnings:
            console.print(Text(f"WARNING {row.trial}: {warning}", style="bold red"), soft_wrap=True)
    if any(record.device == "cpu" for record in records):
        _say(console, _CPU_TIMINGS)


def markdown(
    records: Sequence[RunRecord], reference: str, question: Question | None = None, confirm: str | None = None
) -> str:
    """Return the answer and the table as Markdown, with all usual columns."""
    table, found = study_table(records, reference, question), answer(records, reference, question, confirm=confirm)
    trials = _markdown_of(_drawn(table.choose(), table.rows))
    parts = [f"**{found.headline}** {' '.join(found.particulars)}".strip(), trials, *_about_works(table)]
    for extra in found.tables:
        parts += [f"{extra.title}:", _markdown_of(_answer_table(extra))]
    parts += [f"{row.trial}: {warning}." for row in table.rows for warning in row.warnings]
    if any(record.device == "cpu" for record in records):
        parts.append(_CPU_TIMINGS)
    return "\n\n".join(parts)


def _markdown_of(table: Table) -> str:
    output = StringIO()
    Console(file=output, width=10_000, color_system=None, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines() if line.strip())


def _answer_table(found: AnswerTable) -> Table:
    table = Table(box=box.MARKDOWN)
    for head in found.heads:
        table.add_column(Text(head), justify="left" if head == found.heads[0] else "right", overflow="fold")
    for row in found.rows:
        table.add_row(*map(Text, row))
    return table


def _about_works(table: StudyTable) -> list[str]:
    """Return the title of the workload, or of several, and a sentence about what is compared within each of them."""
    if len(table.works) < 2:
        return list(table.works)
    titles = [f"work {number}: {title}" for number, title in enumerate(table.works, 1)]
    return [*titles, "Losses and speedups are compared within each workload, and throughput across all of them."]


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _narrow(console: Console, columns: list[Column], rows: Sequence[Row]) -> list[str]:
    """Remove the columns with the highest rank until the table fits, and return their headings."""
    left_out = []
    while _width(console, _drawn(columns, rows)) > console.width and any(column.rank for column in columns):
        dropped = max(columns, key=lambda column: column.rank)
        columns.remove(dropped)
        left_out.append(dropped.head)
    return left_out


def _width(console: Console, table: Table) -> int:
    """Return the width at which no cell of `table` is wrapped."""
    return Measurement.get(console, console.options.update(width=10_000), table).maximum


def _drawn(columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    table = Table(box=box.MARKDOWN)
    for column in columns:
        table.add_column(Text(column.head), justify="right" if column.is_number else "left", overflow="fold")
    for row in rows:
        style = "bold" if row is rows[0] and row.is_ok else "" if row.is_ok else "dim"
        table.add_row(*(Text(column.words(row)) for column in columns), style=style)
    return table
