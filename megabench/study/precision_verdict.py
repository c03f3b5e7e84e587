"""Answer in sentences how much faster fp8 trains than bf16, and what fp8 costs in loss. Does not import torch.

fp8 and bf16 trials are ranked separately, because they train different workloads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megabench.record import RunRecord
from megabench.study.bf16_reference import LossComparison, bf16_reference, compare_runs_with_bf16, has_fp8
from megabench.study.intervals import CONFIDENCE
from megabench.study.summary import Row
from megabench.study.verdict import Decision, confirmation, listed


@dataclass(frozen=True)
class PrecisionVerdict:
    """The comparison of the fp8 trials of a work class with the bf16 trials of otherwise equal work, as sentences."""

    headline: str
    particulars: tuple[str, ...]


def precision_verdicts(
    decisions: Mapping[str | None, Decision], records: Sequence[RunRecord], device: str
) -> dict[str | None, PrecisionVerdict]:
    """Return the verdict of each fp8 work class that has a bf16 reference.

    `decisions` holds the decision of each work class. `device` is the unit of throughput figures.
    """
    by_trial = {record.trial: record for record in reversed(records) if record.work_class}
    verdicts: dict[str | None, PrecisionVerdict] = {}
    for key, fp8 in decisions.items():
        record = by_trial.get(fp8.best.trial) if fp8.best else None
        reference = bf16_reference(record, records) if record and has_fp8(record) else None
        bf16 = decisions.get(reference.work_class.id) if reference and reference.work_class else None
        if record and bf16 and fp8.best and bf16.best:
            runs = [run for run in records if run.trial == record.trial and run.work_class == record.work_class]
            losses = compare_runs_with_bf16(runs, records)
            verdicts[key] = PrecisionVerdict(
                headline=f"fp8 {_speed(fp8, bf16)}{_loss(losses)}. {_confirmation(fp8, bf16)}",
                particulars=(
                    f"The fastest trial in fp8 is {fp8.best.trial} with {_figure(fp8.best)} tokens/s per {device}, and "
                    f"the fastest in bf16 is {bf16.best.trial} with {_figure(bf16.best)}.",
                    _same_layout(fp8.good, bf16.good, by_trial),
                    *_losses(losses),
                    "fp8 and bf16 are different workloads, so each precision has a ranking of its own.",
                ),
            )
    return verdicts


def _speed(fp8: Decision, bf16: Decision) -> str:
    assert fp8.best and bf16.best
    speeds = fp8.speeds
    if speeds.may_be_as_fast(fp8.best, bf16.best) and speeds.may_be_as_fast(bf16.best, fp8.best):
        within = f"the {CONFIDENCE} interval" if speeds.ratio(fp8.best, bf16.best) else "the spread"
        return f"trains as fast as bf16 within {within}"
    return f"trains {_times(fp8.best, bf16.best)} as fast as bf16"


def _confirmation(fp8: Decision, bf16: Decision) -> str:
    """Say whether runs confirm which of the two fastest trials is faster."""
    assert fp8.best and bf16.best
    rows = sorted((fp8.best, bf16.best), key=lambda row: row.speed, reverse=True)
    said = confirmation(rows, fp8.speeds)
    return f"The difference in speed is {said[0].lower()}{said[1:]}"


def _loss(losses: LossComparison | None) -> str:
    """Return the second half of the headline."""
    if losses is None:
        return ", and their losses cannot be compared"
    if not losses.is_long_enough:
        return ", but the runs are too short to show whether it learns as well"
    if len(losses.of_seeds) == 1:
        return f", and its loss is {_percent(losses.difference)}"
    if losses.is_within_seeds:
        return f", and its loss is within the range of {len(losses.of_seeds)} bf16 seeds"
    return f", and its loss is {_percent(losses.difference)}, outside the range of {len(losses.of_seeds)} bf16 seeds"


def _losses(losses: LossComparison | None) -> list[str]:
    if losses is None:
        return []
    said = [
        f"The mean loss of the last {losses.num_steps} steps is {losses.loss:.4f} in {losses.trial} (fp8) and "
        f"{losses.reference_loss:.4f} in {losses.reference} (bf16): the loss of fp8 is {_percent(losses.difference)}."
    ]
    if not losses.is_long_enough:
        return said
    if len(losses.of_seeds) == 1:
        said.append("bf16 was trained with one seed, so the part of the difference that is chance is unknown.")
    else:
        low, high = min(losses.of_seeds), max(losses.of_seeds)
        said.append(
            f"With {len(losses.of_seeds)} seeds of the initial weights, the bf16 loss is {low:.4f} to {high:.4f}."
        )
    return said


def _same_layout(fp8: Sequence[Row], bf16: Sequence[Row], by_trial: Mapping[str, RunRecord]) -> str:
    """Compare each fp8 trial with the fastest bf16 trial that has the same layout and settings."""
    pairs = [
        (
            row,
            next((other for other in bf16 if _settings(by_trial[other.trial]) == _settings(by_trial[row.trial])), None),
        )
        for row in fp8
    ]
    said = [f"{row.trial} trains {_times(row, other)} as fast as {other.trial}" for row, other in pairs if other]
    if not said:
        return "No fp8 trial has the same layout and settings as a bf16 trial."
    return f"With the same layout and settings, {listed(said)}."


def _settings(record: RunRecord) -> object:
    network = record.emulated_network
    limit = network and (network.gb_per_s, network.latency_us)
    places = (record.world_size, record.num_hosts, record.emulated_hosts, limit)
    # an option that only fp8 runs can set
    options = {name: value for name, value in record.options.items() if name != "keep_transposed"}
    return record.engine, record.layout, options, record.micro_batch, places


def _percent(difference: float) -> str:
    if abs(difference) < 5e-4:
        return "the same within 0.05%"
    return f"{abs(difference):.1%} {'higher' if difference > 0 else 'lower'}"


def _times(row: Row, other: Row) -> str:
    assert row.tokens_per_second_per_device and other.tokens_per_second_per_device
    return f"{row.tokens_per_second_per_device / other.tokens_per_second_per_device:.2f} ×"


def _figure(row: Row) -> str:
    return f"{row.tokens_per_second_per_device:,.0f}"
