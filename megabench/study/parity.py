"""Compare losses and gradient norms of trials with the reference trial, to check that they did the same work."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from megabench.precision import POLICIES
from megabench.record import Parity, RunRecord
from megabench.specs import registry

# Largest relative difference of the loss at any step. The engines sum in different orders, so results differ by
# rounding: 2^-24 per sum in fp32, 2^-8 in bf16 and 2^-11 in fp16. Training amplifies the difference step by step. A
# missing reduction, a wrong token order or a different initial weight exceeds these tolerances within a few steps.
TOLERANCES = {name: policy.loss_tolerance for name, policy in POLICIES.items()}

# Relative difference of the gradient norm, as the median of the first steps. Later steps amplify rounding. While the
# learning rate warms up, losses hardly depend on the gradients, so they do not reveal wrong gradients. The gradient
# norms of correct engines in benchmarks/ and in make quickstart differ from each other by up to 2e-6 (fp32), 1.2e-3
# (bf16) and 2.4e-5 (fp16).
GRAD_NORM_TOLERANCES = {name: policy.grad_norm_tolerance for name, policy in POLICIES.items()}
NUM_NORMS = 10
FAR_OFF = 1.0  # a difference as large as the norm itself cannot be rounding

Values = Sequence[float | None]  # one value per step; a non-finite value is None, as in records


def compare_losses(losses: Values, expected: Values) -> float | None:
    """Return the largest |loss − expected| ÷ |expected| over all steps, or None if the steps cannot be compared."""
    differences = relative_differences(losses, expected)
    if not differences or None in differences or len(losses) != len(expected):
        return None
    return max(difference for difference in differences if difference is not None)


def compare_grad_norms(norms: Values, expected: Values, may_skip: bool) -> float | None:
    """Return |norm − expected| ÷ |expected|: the median of the first steps, or a single large difference.

    The difference is infinite if only one of the two norms is not finite, unless a loss scale may skip the step
    (`may_skip`).
    """
    norms, expected = norms[:NUM_NORMS], expected[:NUM_NORMS]
    differences = [difference for difference in relative_differences(norms, expected) if difference is not None]
    if not may_skip:
        differences += [math.inf for a, b in zip(norms, expected, strict=False) if (a is None) != (b is None)]
    if not differences:
        return None
    return max(differences) if max(differences) > FAR_OFF else statistics.median(differences)


def relative_differences(values: Values, expected: Values) -> list[float | None]:
    """Return |value − expected| ÷ |expected| for each common step, or None for a step with a non-finite value."""
    return [
        None if a is None or b is None else abs(a - b) / max(abs(b), 1e-12)
        for a, b in zip(values, expected, strict=False)
    ]


def from_same_step(
    record: RunRecord, other: RunRecord, series: Literal["losses", "grad_norms"]
) -> tuple[int, Values, Values]:
    """Return the first common step and the values from it on, because a run may have resumed from a checkpoint."""
    first = max(record.first_step, other.first_step)
    mine, theirs = (getattr(one, series)[first - one.first_step :] for one in (record, other))
    return first, mine, theirs


def judge_parity(records: Sequence[RunRecord], reference: str) -> list[RunRecord]:
    """Fill `parity` in the records, and set `status` to ok or diverged. Records without a result do not change.

    Each work class is compared with the trial `reference` if that trial belongs to the class and has finite losses.
    Otherwise, the class is compared with its first ZeRO-3 trial, or its first trial, with finite losses.
    """
    standards: dict[str, RunRecord] = {}
    for record in sorted(records, key=lambda record: (record.trial != reference, not is_zero3(record))):
        if _is_finished(record) and record.losses and None not in record.losses:
            standards.setdefault(_class_of(record), record)
    return [_judged(record, standards.get(_class_of(record))) if _is_finished(record) else record for record in records]


def is_zero3(record: RunRecord) -> bool:
    return registry.is_zero3(record.engine, record.options)


def default_reference(records: Sequence[RunRecord]) -> str:
    """Return the default reference trial: the first ZeRO-3 trial, or else the first trial."""
    return next((record.trial for record in records if is_zero3(record)), records[0].trial)


def _is_finished(record: RunRecord) -> bool:
    return record.work_class is not None and record.status in ("ok", "diverged")


def _judged(record: RunRecord, standard: RunRecord | None) -> RunRecord:
    parity = Parity(
        reference=standard.trial if standard else record.trial,
        max_relative_difference=None,
        tolerance=TOLERANCES[record.precision],
        grad_norm_difference=None,
        grad_norm_tolerance=GRAD_NORM_TOLERANCES[record.precision],
        verdict="unknown",
    )
    if standard:
        _, losses, expected = from_same_step(record, standard, "losses")
        parity.max_relative_difference = compare_losses(losses, expected)
        # otherwise the first steps of one run would be compared with later steps of the other
        if record.first_step == standard.first_step:
            may_skip = POLICIES[record.precision].scales_loss
            parity.grad_norm_difference = compare_grad_norms(record.grad_norms, standard.grad_norms, may_skip)
    if record.losses or standard is not None:
        parity.verdict = "equal" if _has_equal_losses(parity) and _has_equal_norms(parity) else "diverged"
    update = {
        "parity": parity,
        "status": "diverged" if parity.verdict == "diverged" else "ok",
        "error": _error(parity, record, standard),
    }
    return record.model_copy(update=update)


def _has_equal_losses(parity: Parity) -> bool:
    return parity.max_relative_difference is not None and parity.max_relative_difference <= parity.tolerance


def _has_equal_norms(parity: Parity) -> bool:
    """Return whether the gradient norms agree, also if there are none to compare."""
    tolerance = parity.grad_norm_tolerance
    return parity.grad_norm_difference is None or tolerance is None or parity.grad_norm_difference <= tolerance


def _error(parity: Parity, record: RunRecord, standard: RunRecord | None) -> str | None:
    if parity.verdict != "diverged":
        return None
    if parity.max_relative_difference is None:
        return f"its losses are not finite, or not of the same steps as those of {parity.reference}"
    if _has_equal_losses(parity) and parity.grad_norm_difference == math.inf:
        error = f"its gradient norms, or those of {parity.reference}, are not finite where the others are"
    elif _has_equal_losses(parity):
        difference = f"{parity.grad_norm_difference:.2g} of their value, more than {parity.grad_norm_tolerance:g}"
        error = f"its gradient norms differ from those of {parity.reference} by {difference}; its losses hide it"
    else:
        difference = f"{parity.max_relative_difference:.2g} of their value, more than {parity.tolerance:g}"
        error = f"its losses differ from those of {parity.reference} by up to {difference}"
    if standard and record.num_skipped_steps != standard.num_skipped_steps:
        error += f"; steps skipped (fp16): {record.num_skipped_steps} here, {standard.num_skipped_steps} there"
    return error


def _class_of(record: RunRecord) -> str:
    assert record.work_class is not None
    return record.work_class.id
