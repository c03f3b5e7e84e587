"""Compare the losses of fp8 trials with those of bf16 trials of otherwise equal work. Does not import torch.

fp8 trials are a work class of their own, because fp8 products change what a model learns. Parity compares fp8 trials
only with each other, so the difference between fp8 and bf16 is reported here.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megabench.precision import POLICIES
from megabench.record import RunRecord

Role = Literal["fp8", "bf16", "seed"]
MOST_STEPS = 100  # losses of single steps vary by several percent from batch to batch


@dataclass(frozen=True)
class LossComparison:
    """Mean losses of an fp8 trial and its bf16 reference over the last `num_steps` steps that both trained.

    `num_steps` is MOST_STEPS, or less in shorter runs. The first step of a run is left out, because its loss is that of
    the initial weights. `of_seeds` contains the mean bf16 losses over the same steps, one for each seed of the initial
    weights, with that of the reference. All seeds have the same order of the data.
    """

    trial: str
    reference: str
    num_steps: int
    loss: float
    reference_loss: float
    of_seeds: tuple[float, ...]

    @property
    def difference(self) -> float:
        """The relative difference of the mean losses. It is positive if the loss of fp8 is higher."""
        return self.loss / self.reference_loss - 1

    @property
    def is_long_enough(self) -> bool:
        """Whether the runs trained long enough for a conclusion about how well fp8 learns."""
        return self.num_steps == MOST_STEPS

    @property
    def is_within_seeds(self) -> bool:
        return min(self.of_seeds) <= self.loss <= max(self.of_seeds)


def has_fp8(record: RunRecord) -> bool:
    return POLICIES[record.precision].has_fp8_products


def bf16_reference(record: RunRecord, records: Sequence[RunRecord]) -> RunRecord | None:
    """Return the bf16 record of the same work as the fp8 record `record`, except for the precision, or None.

    Of several bf16 records, return that of the parity reference of their work class.
    """
    same = [other for other in _bf16_records(record, records) if _work(other) == _work(record)]
    return next(
        (other for other in same if other.parity and other.parity.reference == other.trial), next(iter(same), None)
    )


def bf16_of_other_seeds(record: RunRecord, records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return one bf16 record for each other seed of the initial weights with the work and data order of `record`."""
    found: dict[int, RunRecord] = {}
    for other in _bf16_records(record, records):
        if other.work_class and _work(other) != _work(record) and _work(other, seed=None) == _work(record, seed=None):
            found.setdefault(other.work_class.seed, other)
    return list(found.values())


def compare_with_bf16(record: RunRecord, records: Sequence[RunRecord]) -> LossComparison | None:
    """Compare the losses of an fp8 record with those of its bf16 reference.

    Return None without a reference, without common steps after the first, and if one of the losses is not finite.
    """
    reference = bf16_reference(record, records)
    if reference is None:
        return None
    first = max(record.first_step, reference.first_step) + 1
    last = min(record.first_step + len(record.losses), reference.first_step + len(reference.losses)) - 1
    steps = range(max(first, last - MOST_STEPS + 1), last + 1)
    loss, reference_loss = mean_loss(record, steps), mean_loss(reference, steps)
    if loss is None or reference_loss is None:
        return None
    others = [mean_loss(other, steps) for other in bf16_of_other_seeds(record, records)]
    of_seeds = (reference_loss, *(other for other in others if other is not None))
    return LossComparison(record.trial, reference.trial, len(steps), loss, reference_loss, of_seeds)


def compare_runs_with_bf16(runs: Sequence[RunRecord], records: Sequence[RunRecord]) -> LossComparison | None:
    """Compare the median loss of the runs of a repeated fp8 trial; see `compare_with_bf16`."""
    found = [comparison for run in runs if (comparison := compare_with_bf16(run, records))]
    return replace(found[0], loss=statistics.median(one.loss for one in found)) if found else None


def mean_loss(record: RunRecord, steps: range) -> float | None:
    """Return the mean loss of `steps`, or None if the run did not train all of them or a loss is not finite."""
    if not steps or steps.start < record.first_step:
        return None
    losses = record.losses[steps.start - record.first_step : steps.stop - record.first_step]
    finite = [loss for loss in losses if loss is not None]
    return statistics.fmean(finite) if len(finite) == len(steps) else None


def classes_compared_with_bf16(records: Sequence[RunRecord]) -> dict[str, Role]:
    """Return the work classes of fp8 trials with a bf16 reference, of the references, and of bf16 with other seeds."""
    roles: dict[str, Role] = {}
    others: list[RunRecord] = []
    for record in records:
        if record.work_class and (reference := bf16_reference(record, records)) and reference.work_class:
            roles[record.work_class.id], roles[reference.work_class.id] = "fp8", "bf16"
            others += bf16_of_other_seeds(record, records)
    for other in others:
        if other.work_class:
            roles.setdefault(other.work_class.id, "seed")
    return roles


def _bf16_records(record: RunRecord, records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the successful records in the precision that an fp8 run has outside of its fp8 products."""
    if not has_fp8(record):
        return []
    compute = POLICIES[record.precision].compute
    return [other for other in records if other.status == "ok" and other.precision == compute]


def _work(record: RunRecord, **changes: int | None) -> object:
    """Return what must be equal in fp8 and bf16 trials. Records of planned trials have no work class yet."""
    work = record.work_class
    if work is None:
        return (
            record.model,
            record.optimizer,
            record.grad_dtype,
            record.global_batch,
            record.seq_length,
            record.num_steps,
        )
    data_seed = work.seed if work.data_seed is None else work.data_seed
    return work.model_dump(exclude={"data", "precision", "fp8"}) | {"data_seed": data_seed} | changes
