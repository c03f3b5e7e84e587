"""Did the trials of a work class do the same work? Losses and gradient norms, step by step, against the reference's."""

import statistics
from collections.abc import Sequence
from typing import Literal

from megabench.record import Parity, RunRecord

# Largest relative difference of the loss at any step. The engines sum in different orders, so results differ by
# rounding: 2^-24 a sum in fp32, 2^-8 in bf16 and 2^-11 in fp16, and training amplifies a difference step by step. A
# missing reduction, a wrong token order or a different initial weight shows above these within a few steps.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}

# Largest relative difference of the gradient norm in the median of all steps; at any step, so often that. While the
# learning rate warms up, losses hardly depend on gradients, and wrong ones of any size hide. In all studies measured,
# right ones are within 3e-6 (fp32) and 1.2e-3 (bf16, fp16) in the median, and within 5e-4 and 1e-2 at every step.
GRAD_NORM_TOLERANCES = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
AT_ANY_STEP = 10

Values = Sequence[float | None]  # a step each; one that was not finite is None, as in a record


def compare_losses(losses: Values, expected: Values) -> float | None:
    """The largest |loss − expected| ÷ |expected| over all steps; None when they cannot be compared step by step."""
    differences = relative_differences(losses, expected)
    if not differences or None in differences or len(losses) != len(expected):
        return None
    return max(difference for difference in differences if difference is not None)


def relative_differences(values: Values, expected: Values) -> list[float | None]:
    """|value − expected| ÷ |expected| of each step that both have; None where one of them is not finite."""
    return [
        None if a is None or b is None else abs(a - b) / max(abs(b), 1e-12)
        for a, b in zip(values, expected, strict=False)
    ]


def judge_parity(records: Sequence[RunRecord], reference: str) -> list[RunRecord]:
    """The records with `parity` filled and `status` ok or diverged by it; those without a result stay as they are.

    Each work class is compared with the trial `reference` where that is in it and has finite losses, else with the
    class's first such trial, a ZeRO-3 trial before any other.
    """
    standards: dict[str, RunRecord] = {}
    for record in sorted(records, key=lambda record: (record.trial != reference, not is_zero3(record))):
        if _is_finished(record) and record.losses and None not in record.losses:
            standards.setdefault(_class_of(record), record)
    return [_judged(record, standards.get(_class_of(record))) if _is_finished(record) else record for record in records]


def is_zero3(record: RunRecord) -> bool:
    return record.options.get("zero_stage") == 3


def default_reference(records: Sequence[RunRecord]) -> str:
    """The trial to compare with when a study names none: the first ZeRO-3 trial, else the first."""
    return next((record.trial for record in records if is_zero3(record)), records[0].trial)


def _is_finished(record: RunRecord) -> bool:
    return record.work_class is not None and record.status in ("ok", "diverged")


def _judged(record: RunRecord, standard: RunRecord | None) -> RunRecord:
    tolerance, norm_tolerance = TOLERANCES[record.precision], GRAD_NORM_TOLERANCES[record.precision]
    difference = compare_losses(record.losses, standard.losses) if standard else None
    norms = relative_differences(record.grad_norms, standard.grad_norms) if standard else []
    finite = [norm for norm in norms if norm is not None]  # fp16 skips a step whose norm is not
    verdict: Literal["equal", "diverged", "unknown"] = "diverged"
    if not record.losses and standard is None:
        verdict = "unknown"
    elif difference is not None and difference <= tolerance:
        is_right = not finite or statistics.median(finite) <= norm_tolerance >= max(finite) / AT_ANY_STEP
        verdict = "equal" if is_right else "diverged"
    parity = Parity(
        reference=standard.trial if standard else record.trial,
        max_relative_difference=difference,
        tolerance=tolerance,
        max_grad_norm_difference=max(finite, default=None),
        grad_norm_tolerance=norm_tolerance * AT_ANY_STEP,
        verdict=verdict,
    )
    update = {
        "parity": parity,
        "status": "diverged" if verdict == "diverged" else "ok",
        "error": _error(parity, record, standard),
    }
    return record.model_copy(update=update)


def _error(parity: Parity, record: RunRecord, standard: RunRecord | None) -> str | None:
    if parity.verdict != "diverged":
        return None
    if parity.max_relative_difference is None:
        return f"its losses are not finite, or not of as many steps as those of {parity.reference}"
    if parity.max_relative_difference <= parity.tolerance:
        difference = f"{parity.max_grad_norm_difference:.2g} of their value, more than rounding can"
        return f"its gradient norms differ from those of {parity.reference} by up to {difference}; its losses hide it"
    difference = f"{parity.max_relative_difference:.2g} of their value, more than {parity.tolerance:g}"
    error = f"its losses differ from those of {parity.reference} by up to {difference}"
    if standard and record.num_skipped_steps != standard.num_skipped_steps:
        error += f"; steps skipped (fp16): {record.num_skipped_steps} here, {standard.num_skipped_steps} there"
    return error


def _class_of(record: RunRecord) -> str:
    assert record.work_class is not None
    return record.work_class.id
