"""Writes the scalars that the records of a study hold as TensorBoard event files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megabench import UserError
from megabench.record import RunRecord
from megabench.train.callbacks.tensorboard import speed_scalars, step_scalars


def export_scalars(records: Sequence[RunRecord], out: Path) -> int:
    """Write a TensorBoard run for each record that has losses, as training names it; return their number.

    UserError if `out` is no directory, or holds event files already: TensorBoard would show both as one run.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--tensorboard {out} is a file. Give a directory.")
    if next(out.rglob("events.out.tfevents*"), None) if out.exists() else None:
        raise UserError(f"--tensorboard {out} holds event files already. Give a new directory.")
    with_losses = [record for record in records if record.losses]
    for record in with_losses:
        has_repeats = any(other.trial == record.trial and other.repeat != record.repeat for other in with_losses)
        name = Path(record.trial, f"repeat-{record.repeat}") if has_repeats else Path(record.trial)
        try:
            with SummaryWriter(str(out / name)) as writer:
                for step, values in scalars_of(record):
                    for tag, value in values.items():
                        if value is not None:
                            writer.add_scalar(tag, value, step)
        except OSError as error:
            reason = error.strerror
            raise UserError(f"--tensorboard {out} cannot be written: {reason}. Give another directory.") from None
    return len(with_losses)


def scalars_of(record: RunRecord) -> Iterator[tuple[int, dict[str, float | None]]]:
    """The number of each step, counted from 1, and its scalars by tag; None for those that the record lacks.

    Step times are those of the slowest rank; during training rank 0 writes its own.
    """
    memory = record.peak_memory_gib_by_step if record.device not in (None, "cpu") else None
    timed = record.step_seconds.all if record.step_seconds else []
    for index, loss in enumerate(record.losses):
        values = step_scalars(
            loss=loss,
            grad_norm=record.grad_norms[index] if index < len(record.grad_norms) else None,
            learning_rate=record.learning_rates[index] if record.learning_rates else None,
            peak_memory_gib=memory[index] if memory else None,
            gpu_utilization=record.gpu_utilization_by_step[index] if record.gpu_utilization_by_step else None,
        )
        if index >= record.warmup_steps and index - record.warmup_steps < len(timed):
            values |= _speed(record, timed[index - record.warmup_steps])
        yield record.first_step + index, values


def _speed(record: RunRecord, seconds: float) -> dict[str, float | None]:
    """The scalars of a timed step, scaled from the record's median step."""
    assert record.step_seconds and record.tokens_per_second and record.model_tflops_per_device
    faster = record.step_seconds.median / seconds
    return speed_scalars(
        seconds=seconds,
        tokens_per_second=record.tokens_per_second * faster,
        world_size=record.world_size,
        tflops_per_device=record.model_tflops_per_device.causal * faster,
        mfu=record.mfu * faster if record.mfu is not None else None,
    )
