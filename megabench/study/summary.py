"""Summary of a study: a row for each trial, titles of the work classes, and the length and price of a whole run.

The rows are sorted by throughput within each work class.
"""

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megabench.atomic_write import write_atomically
from megabench.metrics import DEFAULT_TOKENS, token_words
from megabench.parallel.layout import Layout
from megabench.record import RunRecord, WorkClass
from megabench.specs.all_settings import labels
from megabench.specs.registry import ENGINES_AND_PROGRAMS
from megabench.study.bf16_reference import compare_runs_with_bf16
from megabench.study.parity import is_zero3

_SEVERITY = ("ok", "diverged", "timeout", "oom", "failed")


@dataclass(frozen=True)
class Row:
    """One trial, with medians over its successful runs. Unknown values are None.

    `ratio` is the tokens/s per device relative to the reference trial of the same work class, and `throughput_ratio`
    relative to the reference of the study, whatever the work is. A trial that is not ok has no ratio. A trial without a
    result has the `work_class` of the trials that requested equal work, or None if these have several;
    `num_skipped_steps` is the maximum over all runs.
    `loss_difference_from_bf16` is the signed relative difference of the mean loss of an fp8 trial from that of its bf16
    reference (study/bf16_reference.py).
    """

    trial: str
    engine: str
    zero_stage: int | None
    layout: str
    world_size: int
    num_hosts: int | None
    is_emulated: bool
    emulated_gb_per_s: float | None
    emulated_latency_us: int
    micro_batch: int
    model: str
    precision: str
    seq_length: int
    global_batch: int
    optimizer: str
    device: str | None
    num_runs: int
    step_seconds: float | None
    tokens_per_second_per_device: float | None
    tokens_per_second_per_device_min: float | None
    tokens_per_second_per_device_max: float | None
    tflops_per_device: float | None
    mfu: float | None
    peak_memory_gib: float | None
    samples_per_second: float | None
    gpu_utilization: float | None
    gpu_watts: float | None
    gpu_joules_per_token: float | None
    first_step_seconds: float | None
    warmup_seconds: float | None
    sent_gb_per_rank_and_step: float | None
    days_per_100b_tokens: float | None
    ratio: float | None
    throughput_ratio: float | None
    reference: str
    parity: str
    max_relative_difference: float | None
    grad_norm_difference: float | None
    num_tensors_compared: int | None
    tensor_difference_in_tolerances: float | None
    loss_difference_from_bf16: float | None
    status: str
    num_skipped_steps: int
    reason: str | None
    work_class: str | None
    ended_at: str | None
    commit: str | None
    warnings: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def speed(self) -> float:
        """The tokens/s per device of a trial with a result."""
        assert self.tokens_per_second_per_device is not None
        return self.tokens_per_second_per_device


@dataclass(frozen=True)
class Budget:
    """A number of training tokens, and the price of a GPU for an hour in any currency, if known."""

    num_tokens: float = DEFAULT_TOKENS
    price_per_gpu_hour: float | None = None

    @property
    def words(self) -> str:
        """Return the number of tokens as text: "100 billion tokens"."""
        return token_words(self.num_tokens)

    def days(self, row: Row) -> float | None:
        """Return the days of an uninterrupted run."""
        return row.days_per_100b_tokens and row.days_per_100b_tokens * self.num_tokens / DEFAULT_TOKENS

    def cost(self, row: Row) -> float | None:
        """Return the price of the run on all GPUs of the trial."""
        days = self.days(row)
        return days * 24 * row.world_size * self.price_per_gpu_hour if days and self.price_per_gpu_hour else None


def runs_by_trial(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return the runs of each trial, in the order of the records."""
    by_trial: dict[str, list[RunRecord]] = {}
    for record in records:
        by_trial.setdefault(record.trial, []).append(record)
    return by_trial


def speeds_of(records: Sequence[RunRecord]) -> list[float]:
    """Return the tokens/s per device of the runs that measured it."""
    return [record.tokens_per_second_per_device for record in records if record.tokens_per_second_per_device]


def summarize(records: Sequence[RunRecord], reference: str) -> list[Row]:
    """One row a trial.

    The work class of the reference comes first. Within a class, successful trials come first, sorted by throughput.
    Trials without a work class come last.
    """
    by_trial = runs_by_trial(records)
    references = _references(records, reference)
    rows = [
        _row(runs, records, by_trial, references.get(_class_of(runs, records), reference), reference)
        for runs in by_trial.values()
    ]
    reference_first = sorted(rows, key=lambda row: row.trial != reference)
    classes = list(dict.fromkeys(row.work_class for row in reference_first if row.work_class))
    place: dict[str | None, int] = {work_class: number for number, work_class in enumerate(classes)}
    place[None] = len(classes)
    return sorted(
        rows, key=lambda row: (place[row.work_class], not row.is_ok, -(row.tokens_per_second_per_device or 0.0))
    )


def write_csv(path: Path, records: Sequence[RunRecord], reference: str) -> None:
    """Write a line per trial with the columns of `Row` and the axes of its layout, atomically."""
    table = io.StringIO(newline="")
    by_trial = runs_by_trial(records)
    lines = [
        {field.name: _cell(getattr(row, field.name)) for field in fields(Row)}
        | by_trial[row.trial][0].layout.model_dump()
        | {"warnings": _cell("; ".join(row.warnings))}
        for row in summarize(records, reference)
    ]
    writer = csv.DictWriter(table, lines[0] if lines else ())
    writer.writeheader()
    writer.writerows(lines)
    write_atomically(path, table.getvalue())


def _cell(value: Any) -> Any:
    """Return a value, or text that no spreadsheet evaluates as a formula: a record may come from somebody else."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else value


def _joules_per_token(run: RunRecord) -> float | None:
    speed = run.tokens_per_second_per_device
    return run.gpu_watts / speed if run.gpu_watts and speed else None


def layout_name(record: RunRecord) -> str:
    """Return the layout as text: "tp2·pp2·dp2"."""
    return str(Layout(**record.layout.model_dump()))


def engine_name(record: RunRecord) -> str:
    """Return the engine with its mode and its non-default options: "deepspeed ZeRO-3, hpz 4"."""
    options, spec = record.options, ENGINES_AND_PROGRAMS.get(record.engine)
    mode = spec.mode(options) if spec else None
    return ", ".join([f"{record.engine} {mode}" if mode else record.engine, *labels(options)])


def reference_name(records: Sequence[RunRecord], reference: str) -> str:
    """Return the name of the reference in the header of a table, which is "ZeRO-3" or the name of the trial."""
    return "ZeRO-3" if any(record.trial == reference and is_zero3(record) for record in records) else reference


def class_titles(records: Sequence[RunRecord]) -> dict[str | None, str]:
    """Return a title for each work class: the work, and its difference from the other classes."""
    classes = {record.work_class.id: record for record in records if record.work_class}
    settings = {name: _distinct_settings(record.work_class) for name, record in classes.items() if record.work_class}
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


def _distinct_settings(work_class: WorkClass) -> dict[str, Any]:
    """Return the properties of a work class that not every title contains, with the schedule's settings included."""
    in_every_title = {"model", "precision", "global_batch", "seq_length"}
    settings = work_class.model_dump(exclude={"schedule", "data", "fp8", *in_every_title})
    fp8 = work_class.fp8
    return (
        settings
        | {field: value if isinstance(value, str) else f"{value:g}" for field, value in work_class.rules.items()}
        | {
            "fp8_recipe": fp8.recipe if fp8 else None,
            "num_layers_at_start_in_bf16": fp8.num_layers_at_start_in_bf16 if fp8 else 0,
            "num_layers_at_end_in_bf16": fp8.num_layers_at_end_in_bf16 if fp8 else 0,
        }
    )


def _references(records: Sequence[RunRecord], reference: str) -> dict[str | None, str]:
    """Return the reference of each work class.

    If `reference` is a ZeRO-3 trial, a class without it uses its own fastest ZeRO-3 trial.
    """
    has_zero3 = any(is_zero3(record) for record in records if record.trial == reference)
    good = [record for record in records if record.work_class and record.status == "ok"]
    found: dict[str | None, str] = {}
    for record in sorted(good, key=lambda record: (record.trial != reference, -sum(speeds_of([record])))):
        if record.trial == reference or (has_zero3 and is_zero3(record)):
            found.setdefault(_class(record), record.trial)
    return found


def _row(
    runs: Sequence[RunRecord],
    records: Sequence[RunRecord],
    by_trial: Mapping[str, Sequence[RunRecord]],
    reference: str,
    study_reference: str,
) -> Row:
    worst = max(runs, key=lambda record: _SEVERITY.index(record.status))
    num_bad = sum(record.status != "ok" for record in runs)
    measured = [record for record in runs if record.work_class]
    work_class = _class_of(runs, records)
    speeds = speeds_of(measured)
    expected = speeds_of(
        [run for run in by_trial.get(reference, ()) if run.status == "ok" and _class(run) == work_class]
    )
    parities = [record.parity for record in runs if record.parity]
    differences = [p.max_relative_difference for p in parities if p.max_relative_difference is not None]
    norms = [p.grad_norm_difference for p in parities if p.grad_norm_difference is not None]
    tensors = [p.tensors for p in parities if p.tensors]
    losses = compare_runs_with_bf16(measured, records)
    verdicts = {parity.verdict for parity in parities}
    if len(runs) == 1 and runs[0].trial != reference and verdicts and parities[0].reference == runs[0].trial:
        verdicts = set()  # a run cannot confirm itself
    first = runs[0]

    def median(read: Callable[[RunRecord], float | None]) -> float | None:
        return _median([value for run in measured if (value := read(run)) is not None])

    return Row(
        trial=first.trial,
        engine=engine_name(first),
        zero_stage=first.options.get("zero_stage"),
        layout=layout_name(first),
        world_size=first.world_size,
        num_hosts=first.num_hosts,
        is_emulated=first.emulated_hosts is not None,
        emulated_gb_per_s=first.emulated_network.gb_per_s if first.emulated_network else None,
        emulated_latency_us=first.emulated_network.latency_us if first.emulated_network else 0,
        micro_batch=first.micro_batch,
        model=first.model,
        precision=first.precision,
        seq_length=first.seq_length,
        global_batch=first.global_batch,
        optimizer=first.optimizer,
        device=first.device,
        num_runs=len(runs),
        step_seconds=median(lambda run: run.step_seconds.median if run.step_seconds else None),
        tokens_per_second_per_device=_median(speeds),
        tokens_per_second_per_device_min=min(speeds, default=None),
        tokens_per_second_per_device_max=max(speeds, default=None),
        tflops_per_device=median(
            lambda run: run.model_tflops_per_device.causal if run.model_tflops_per_device else None
        ),
        mfu=median(lambda run: run.mfu),
        peak_memory_gib=max((r.peak_memory_gib.max for r in measured if r.peak_memory_gib), default=None),
        samples_per_second=median(lambda run: run.samples_per_second),
        gpu_utilization=median(lambda run: run.gpu_utilization),
        gpu_watts=median(lambda run: run.gpu_watts),
        gpu_joules_per_token=median(_joules_per_token),
        first_step_seconds=median(lambda run: run.first_step_seconds),
        warmup_seconds=median(lambda run: run.warmup_seconds),
        sent_gb_per_rank_and_step=median(lambda run: sum(run.wire_bytes.values()) / 1e9 if run.wire_bytes else None),
        days_per_100b_tokens=median(lambda run: run.days_per_100b_tokens),
        ratio=None if num_bad else _ratio(speeds, expected),
        throughput_ratio=None if num_bad else _ratio(speeds, speeds_of(by_trial.get(study_reference, ()))),
        reference=reference,
        parity=next((verdict for verdict in ("diverged", "equal") if verdict in verdicts), "unknown"),
        max_relative_difference=max(differences, default=None),
        grad_norm_difference=max(norms, default=None),
        num_tensors_compared=min((each.num_tensors for each in tensors), default=None),
        tensor_difference_in_tolerances=max((each.part_of_tolerance for each in tensors), default=None),
        loss_difference_from_bf16=losses.difference if losses else None,
        status=worst.status,
        num_skipped_steps=max(record.num_skipped_steps for record in runs),
        reason=worst.error and (f"{num_bad} of {len(runs)} runs: " if len(runs) > 1 else "") + worst.error,
        work_class=work_class,
        ended_at=runs[-1].ended_at,
        commit=first.environment.commit if first.environment else None,
        warnings=tuple(dict.fromkeys(warning for record in runs for warning in record.warnings)),
    )


def _class_of(runs: Sequence[RunRecord], records: Sequence[RunRecord]) -> str | None:
    """Return the work class of a trial.

    If the trial has no result, return the class of the trials that requested equal work, or None if they have no class
    or several.
    """
    if found := [_class(record) for record in runs if record.work_class]:
        return found[0]
    requested = _requested_work(runs[0])
    alike = {_class(record) for record in records if record.work_class and _requested_work(record) == requested}
    return alike.pop() if len(alike) == 1 else None


def _requested_work(record: RunRecord) -> tuple[Any, ...]:
    return record.model, record.precision, record.grad_dtype, record.global_batch, record.seq_length, record.world_size


def _class(record: RunRecord) -> str | None:
    return record.work_class.id if record.work_class else None


def _ratio(speeds: Sequence[float], expected: Sequence[float]) -> float | None:
    return statistics.median(speeds) / statistics.median(expected) if speeds and expected else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
