"""The columns of a study's table, in the terminal, in README.md and on the report page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megabench.config import near_matches
from megabench.errors import UserError
from megabench.record import RunRecord
from megabench.study.study import Question
from megabench.study.summary import Budget, Row, class_titles, reference_name, summarize
from megabench.study.verdict import Spread, device_word, speeds_by_trial

_UNKNOWN = "–"
_ALWAYS = ("trial", "tokens_per_second_per_device", "ratio", "parity")
_EXTRA = (  # shown on request
    "days_per_100b_tokens",
    "spread",
    "samples_per_second",
    "gpu_utilization",
    "gpu_watts",
    "gpu_joules_per_token",
    "first_step_seconds",
    "warmup_seconds",
    "sent_gb_per_rank_and_step",
    "ended_at",
    "commit",
)


class ColumnError(UserError):
    """Raised for a column that does not exist."""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    `key` is the name of the column in summary.csv, if it is there. `sort` returns the value by which the rows are
    sorted, or an empty text for an unknown value. If a table is too wide, columns with the highest `rank` are omitted
    first.
    """

    key: str
    head: str
    words: Callable[[Row], str]
    sort: Callable[[Row], float | str]
    rank: int = 0
    is_number: bool = True


@dataclass(frozen=True)
class StudyTable:
    """The rows of a study and all columns. `works` are the titles of the work classes.

    `informative` are the columns that tell something: those with a known value, and of the settings those that vary.
    With `has_days`, the usual columns include the days of a run.
    """

    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    informative: tuple[Column, ...]
    works: tuple[str, ...]
    has_days: bool

    def choose(self, names: Sequence[str] = ()) -> list[Column]:
        """Return the columns with these keys in this order.

        Return the usual informative columns without names, and all informative columns for "all". Raises ColumnError
        for another name.
        """
        if not names:
            shown = {"days_per_100b_tokens"} if self.has_days else set()
            return [column for column in self.informative if column.key not in _EXTRA or column.key in shown]
        if "all" in names:
            return list(self.informative)
        by_key = {column.key: column for column in self.columns}
        for name in names:
            if name not in by_key:
                raise ColumnError(f"--columns {name} is not a column; {near_matches(name, [*by_key, 'all'])}")
        return [by_key[name] for name in dict.fromkeys(names)]


def study_table(
    records: Sequence[RunRecord], reference: str, question: Question | None = None, budget: Budget | None = None
) -> StudyTable:
    """Return the table of a study, with one row per trial."""
    has_days, budget = question == "days" or budget is not None, budget or Budget()
    rows = tuple(summarize(records, reference))
    titles = class_titles(records)
    classes = [key for key in dict.fromkeys(row.work_class for row in rows) if key]
    made = _columns(records, reference, budget, {key: number for number, key in enumerate(classes, 1)})
    if len({row.micro_batch for row in rows}) == 1:  # without a sweep, other columns matter more
        made.sort(key=lambda column: column.key == "micro_batch")
    unused = set() if len(classes) > 1 else {"work", "throughput_ratio"}
    if len(classes) > 1 and all(row.ratio in (None, row.throughput_ratio) for row in rows):
        unused.add("ratio")
    kept = tuple(c for c in made if c.key not in unused and (c.key in _ALWAYS or _is_informative(c, rows)))
    return StudyTable(rows, tuple(made), kept, tuple(titles[key] for key in classes), has_days)


def _is_informative(column: Column, rows: Sequence[Row]) -> bool:
    """Return whether a column has a known value, and for the settings of the work, several values."""
    values = {column.words(row) for row in rows}
    if column.key in ("model", "precision", "optimizer", "global_batch", "seq_length", "world_size", "status"):
        return len(values) > 1 or (column.key == "status" and values != {"ok"})
    if column.key == "num_hosts":
        return any(row.num_hosts not in (None, 1) for row in rows)
    return values != {_UNKNOWN}


def _columns(
    records: Sequence[RunRecord], reference: str, budget: Budget, works: Mapping[str | None, int]
) -> list[Column]:
    head, device = reference_name(records, reference), device_word(records)
    spreads = speeds_by_trial(records).spreads
    equal_work = ", equal work" if len(works) > 1 else ""
    devices = "GPUs" if device == "GPU" else "processes"
    return [
        _text("trial", "trial", lambda row: row.trial),
        _text("work", "work", lambda row: str(works.get(row.work_class, _UNKNOWN))),
        _text("model", "model", lambda row: row.model),
        _text("precision", "precision", lambda row: row.precision),
        _text("optimizer", "optimizer", lambda row: row.optimizer),
        _number("global_batch", "batch", lambda row: row.global_batch, "d"),
        _number("seq_length", "sequence", lambda row: row.seq_length, "d"),
        _number("micro_batch", "micro-batch", lambda row: row.micro_batch, "d", 6),
        _number("world_size", devices, lambda row: row.world_size, "d"),
        Column("tokens_per_second_per_device", f"tok/s per {device}", _speed, _sort(_tokens)),
        _number("days_per_100b_tokens", f"days for {budget.words}", budget.days, ",.1f"),
        _number("cost", f"cost of {budget.words}", budget.cost, ",.0f"),
        _number("throughput_ratio", f"throughput × {head}", lambda row: row.throughput_ratio, ".2f"),
        _number("ratio", f"× {head}{equal_work}", lambda row: row.ratio, ".2f"),
        Column("parity", "parity", _parity, _sort(lambda row: row.max_relative_difference), is_number=False),
        _number("loss_difference_from_bf16", "loss minus bf16", lambda row: row.loss_difference_from_bf16, "+.1%", 4),
        _text("status", "status", status_words),
        _number("step_seconds", "step s", lambda row: row.step_seconds, ".4g", 2),
        _number("mfu", "MFU", lambda row: row.mfu, ".1%", 1),
        _number("peak_memory_gib", "peak GiB", lambda row: row.peak_memory_gib, ".2f", 4),
        _text("layout", "layout", lambda row: row.layout, 3),
        _text("engine", "engine", lambda row: row.engine, 7),
        Column("num_hosts", "hosts", _hosts, _sort(lambda row: row.num_hosts)),
        _number("tflops_per_device", f"TFLOP/s per {device}", lambda row: row.tflops_per_device, ".3g", 5),
        Column("spread", "spread of tok/s", *_spread(spreads)),
        _number("samples_per_second", "samples/s", lambda row: row.samples_per_second, ".3g"),
        _number("gpu_utilization", "GPU utilization", lambda row: row.gpu_utilization, ".0%"),
        _number("gpu_watts", f"W per {device}", lambda row: row.gpu_watts, ".0f"),
        _number("gpu_joules_per_token", "J per token", lambda row: row.gpu_joules_per_token, ".3g"),
        _number("first_step_seconds", "first step s", lambda row: row.first_step_seconds, ".3g"),
        _number("warmup_seconds", "warm-up s", lambda row: row.warmup_seconds, ".3g"),
        _number("sent_gb_per_rank_and_step", "GB sent per rank and step", lambda r: r.sent_gb_per_rank_and_step, ".3g"),
        _text("ended_at", "ended at", lambda row: row.ended_at or _UNKNOWN),
        _text("commit", "commit", lambda row: row.commit or _UNKNOWN),
    ]


def _text(key: str, head: str, words: Callable[[Row], str], rank: int = 0) -> Column:
    return Column(key, head, words, words, rank, is_number=False)


def _number(key: str, head: str, read: Callable[[Row], float | None], form: str, rank: int = 0) -> Column:
    def words(row: Row) -> str:
        value = read(row)
        return _UNKNOWN if value is None else format(value, form)

    return Column(key, head, words, _sort(read), rank)


def _sort(read: Callable[[Row], float | None]) -> Callable[[Row], float | str]:
    def value(row: Row) -> float | str:
        found = read(row)
        return "" if found is None else found

    return value


def _tokens(row: Row) -> float | None:
    return row.tokens_per_second_per_device


def _speed(row: Row) -> str:
    low, high = row.tokens_per_second_per_device_min, row.tokens_per_second_per_device_max
    spread = f" ({low:,.0f}–{high:,.0f})" if row.num_runs > 1 and low is not None and high is not None else ""
    speed = row.tokens_per_second_per_device
    return _UNKNOWN if speed is None else f"{speed:,.0f}{spread}"


def _spread(spreads: Mapping[str, Spread]) -> tuple[Callable[[Row], str], Callable[[Row], float | str]]:
    def words(row: Row) -> str:
        spread = spreads.get(row.trial)
        return f"{spread.low:,.0f}–{spread.high:,.0f}" if spread else _UNKNOWN

    def width(row: Row) -> float | None:
        spread = spreads.get(row.trial)
        return spread.high - spread.low if spread else None

    return words, _sort(width)


def _hosts(row: Row) -> str:
    if row.num_hosts is None:
        return _UNKNOWN
    limit = f" at {row.emulated_gb_per_s:g} GB/s" if row.emulated_gb_per_s else ""
    limit += f" and {row.emulated_latency_us} µs" * (row.emulated_latency_us > 0)
    return f"{row.num_hosts}{' emulated' * row.is_emulated}{limit}"


def status_words(row: Row) -> str:
    status = "DIVERGED" if row.status == "diverged" else row.status
    return f"{status}, {row.num_skipped_steps} steps skipped" if row.num_skipped_steps else status


def _parity(row: Row) -> str:
    difference = "" if row.max_relative_difference is None else f" {row.max_relative_difference:.1g}"
    norms = "" if row.grad_norm_difference is None else f", gradients {row.grad_norm_difference:.1g}"
    if row.parity == "equal" and row.trial == row.reference:
        return "reference"
    return {"equal": f"equal{difference}", "diverged": f"DIVERGED{difference}{norms}", "unknown": _UNKNOWN}[row.parity]
