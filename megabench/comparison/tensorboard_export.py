"""Write the records of a study as TensorBoard event files."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megabench.comparison.hparams import write_hparams
from megabench.errors import UserError
from megabench.metrics import speed_metrics, step_metrics
from megabench.optim.schedules import learning_rate
from megabench.record import RunRecord
from megabench.study.expand import SAFE_NAME
from megabench.study.study import run_folder


def check_output(out: Path) -> None:
    """Raise UserError if `out` is a file or contains event files, which TensorBoard would merge with the new ones."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--tensorboard {out} is a file. Give a directory.")
    if out.exists() and any(out.rglob("events.out.tfevents*")):
        raise UserError(f"--tensorboard {out} already contains event files. Give a new directory.")


def export_records(records: Sequence[RunRecord], out: Path) -> int:
    """Write a TensorBoard run for each record: the scalars of its steps with the tags of training, and HPARAMS.

    Return the number of runs with steps. Raises UserError if no record contains a step, if a trial's name is not a
    valid directory name, or if `out` is not writable.
    """
    runs = {run_folder(record.trial, record.repeat): record for record in records}
    with_steps = {name: record for name, record in runs.items() if record.losses}
    if not with_steps:
        raise UserError("no record contains a step, so there are no scalars to write. Omit --tensorboard.")
    for record in records:
        if not SAFE_NAME.fullmatch(record.trial):
            raise UserError(f"trial {record.trial!r} cannot name a directory. Rename it in results.jsonl.")
    try:
        for name, record in with_steps.items():
            with SummaryWriter(str(out / name)) as writer:
                for step, values in scalars_of(record):
                    for tag, value in values.items():
                        if value is not None:
                            writer.add_scalar(tag, value, step)
        write_hparams(out, runs)
    except OSError as error:
        reason = error.strerror
        raise UserError(f"--tensorboard {out} cannot be written: {reason}. Give another directory.") from None
    return len(with_steps)


def scalars_of(record: RunRecord) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Yield each step's number, counted from 1, and its scalars by tag. A scalar that the record lacks is None.

    Step times are those of the slowest rank. During training, rank 0 writes its own step times.
    """
    memory, utilization = record.peak_memory_gib_by_step, record.gpu_utilization_by_step
    rates = record.learning_rates or _scheduled_rates(record)
    timed = record.step_seconds.all if record.step_seconds else []
    for index, loss in enumerate(record.losses):
        values = step_metrics(
            loss=_measured(loss),
            grad_norm=_measured(record.grad_norms[index]) if index < len(record.grad_norms) else None,
            learning_rate=rates[index] if rates else None,
            peak_memory_gib=memory[index] if memory and record.device != "cpu" else None,
            gpu_utilization=utilization[index] if utilization else None,
        )
        if index >= record.warmup_steps and index - record.warmup_steps < len(timed):
            values |= _speed(record, timed[index - record.warmup_steps])
        yield record.first_step + index, values


def _measured(value: float | None) -> float:
    """Return NaN for None, because records store non-finite losses and norms as null."""
    return math.nan if value is None else value


def _scheduled_rates(record: RunRecord) -> list[float] | None:
    """Return the learning rate of each step, from the schedule of the work class."""
    if record.work_class is None or not {"lr", "min_lr", "lr_warmup", "steps"} <= record.work_class.schedule.keys():
        return None
    schedule: Any = SimpleNamespace(**{"decay_steps": None} | record.work_class.rules)
    first = record.first_step - 1
    return [learning_rate(schedule, first + index) for index in range(len(record.losses))]


def _speed(record: RunRecord, seconds: float) -> dict[str, float | None]:
    """Return the scalars of a timed step, scaled from the record's median step."""
    assert record.step_seconds and record.tokens_per_second and record.model_tflops_per_device
    faster = record.step_seconds.median / seconds
    return speed_metrics(
        seconds=seconds,
        tokens_per_second=record.tokens_per_second * faster,
        world_size=record.world_size,
        tflops_per_device=record.model_tflops_per_device.causal * faster,
        mfu=record.mfu * faster if record.mfu is not None else None,
    )
