"""Compare losses and gradient norms of trials with the reference trial, to check that they did the same work."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

from megabench.precision import POLICIES
from megabench.record import Parity, RunRecord, TensorParity
from megabench.specs import registry

# Largest relative difference of the loss at any step. A missing reduction, a wrong token order or a different initial
# weight exceeds these tolerances within a few steps.
TOLERANCES = {name: policy.loss_tolerance for name, policy in POLICIES.items()}

# The engines sum in different orders, so results differ by rounding: 2^-24 per sum in fp32, 2^-8 in bf16 and 2^-11 in
# fp16. Training amplifies the difference. A real error shows in the first steps, or as a jump. A difference may
# therefore grow beyond the tolerance only if it is at most `loss_rounding` in the first steps, and not faster than
# rounding grows. Measured with tools/rounding_growth.py (docs/definitions.md) between runs whose initial weights
# differ in the last bit, 200 to 300 steps: in fp32, the losses of the first 10 steps differ by up to 6e-7. Above 1e-6,
# the difference grows by up to 19 times per step. In 10 steps, it reaches up to 680 times `loss_rounding`. It stops at
# 0.06 (fp32) or 0.08 (bf16). The mean loss of 50 steps differs by up to 1.4% (fp32) or 1.7% (bf16).
FIRST_STEPS = 10  # of steps with the largest learning rate
GROWTH_PER_STEP = 30.0
GROWTH_PER_10_STEPS = 1000.0
GROWN_TOLERANCE = 0.1  # a difference that has grown from rounding
MEAN_STEPS = 50
_SAME_LEARNING_RATE = 1e-6

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


def loss_problem(
    losses: Values,
    expected: Values,
    precision: str,
    first_step: int = 1,
    learning_rates: Values = (),
    are_tensors_equal: bool = False,
) -> str | None:
    """Return how finite losses differ from `expected`, or None if rounding explains the difference.

    The losses and learning rates are those of the same steps, from `first_step` on. If the tensors of the first steps
    are equal, including the updates of the weights, only FIRST_STEPS steps must agree to `loss_rounding`. Otherwise,
    more steps must agree while the learning rate warms up, because an error of the optimizer hardly shows in them.
    """
    policy = POLICIES[precision]
    differences = [difference or 0.0 for difference in relative_differences(losses, expected)]
    if max(differences) <= policy.loss_tolerance:
        return None
    num_first = FIRST_STEPS if are_tensors_equal else _num_first_steps(learning_rates)
    if max(differences[:num_first]) > policy.loss_rounding:
        return f"by up to {max(differences):.2g} of their value, more than {policy.loss_tolerance:g}"
    so_far = list(accumulate(differences, max))
    for index in range(FIRST_STEPS, len(differences)):
        before = max(so_far[index - FIRST_STEPS], policy.loss_rounding)
        grown = min(so_far[index - 1] * GROWTH_PER_STEP, before * GROWTH_PER_10_STEPS, GROWN_TOLERANCE)
        if differences[index] > (limit := max(grown, policy.loss_tolerance)):
            amount = f"by {differences[index]:.2g} of their value at step {first_step + index}"
            return f"{amount}, more than the {limit:.2g} to which rounding can grow until then"
    for step, difference in enumerate(relative_differences(_moving_means(losses), _moving_means(expected)), first_step):
        if difference and difference > policy.mean_loss_tolerance:
            amount = f"by {difference:.2g} of their mean over steps {step} to {step + MEAN_STEPS - 1}"
            return f"{amount}, more than {policy.mean_loss_tolerance:g}"
    return None


def _num_first_steps(learning_rates: Values) -> int:
    """Return the number of steps until the learning rates add up to FIRST_STEPS times the largest one.

    During warm-up, the weights hardly change, so that errors of the optimizer hardly show in the losses.
    """
    rates = [rate or 0.0 for rate in learning_rates]
    enough = FIRST_STEPS * max(rates, default=0.0)
    reached = (step for step, total in enumerate(accumulate(rates), 1) if total >= enough)
    return max(FIRST_STEPS, next(reached, len(rates)))


def _moving_means(values: Values) -> list[float]:
    """Return the means of all `MEAN_STEPS` consecutive values."""
    sums = list(accumulate((value or 0.0 for value in values), initial=0.0))
    return [(end - start) / MEAN_STEPS for start, end in zip(sums, sums[MEAN_STEPS:], strict=False)]


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
    record: RunRecord, other: RunRecord, series: Literal["losses", "grad_norms", "learning_rates"]
) -> tuple[int, Values, Values]:
    """Return the first common step and the values from it on, because a run may have resumed from a checkpoint."""
    first = max(record.first_step, other.first_step)
    mine, theirs = (getattr(one, series)[first - one.first_step :] for one in (record, other))
    return first, mine, theirs


Key = tuple[str | None, int]  # trial_id and repeat of a record


def judge_parity(
    records: Sequence[RunRecord], reference: str, tensors: Mapping[tuple[Key, Key], TensorParity] | None = None
) -> list[RunRecord]:
    """Fill `parity` in the records, and set `status` to ok or diverged. Records without a result do not change.

    `tensors` are comparisons of the sketches of a record and of the record that it is compared with. Without them, the
    comparisons in the records stay if they are with the same trial.

    Each work class is compared with the trial `reference` if that trial belongs to the class and has finite losses.
    Otherwise, the class is compared with its first ZeRO-3 trial, or its first trial, with finite losses.
    """
    standards = standards_of(records, reference)
    return [
        _judged(record, standards.get(_class_of(record)), tensors or {}) if _is_finished(record) else record
        for record in records
    ]


def standards_of(records: Sequence[RunRecord], reference: str) -> dict[str, RunRecord]:
    """Return the record with which each work class is compared, by the class's identifier; see `judge_parity`."""
    standards: dict[str, RunRecord] = {}
    for record in sorted(records, key=lambda record: (record.trial != reference, not is_zero3(record))):
        if _is_finished(record) and record.losses and None not in record.losses:
            standards.setdefault(_class_of(record), record)
    return standards


def is_zero3(record: RunRecord) -> bool:
    return registry.is_zero3(record.engine, record.options)


def default_reference(records: Sequence[RunRecord]) -> str:
    """Return the default reference trial: the first ZeRO-3 trial, or else the first trial."""
    return next((record.trial for record in records if is_zero3(record)), records[0].trial)


def _is_finished(record: RunRecord) -> bool:
    return record.work_class is not None and record.status in ("ok", "diverged")


def key_of(record: RunRecord) -> Key:
    return record.trial_id, record.repeat


def _judged(
    record: RunRecord, standard: RunRecord | None, tensors: Mapping[tuple[Key, Key], TensorParity]
) -> RunRecord:
    parity = Parity(
        reference=standard.trial if standard else record.trial,
        max_relative_difference=None,
        tolerance=TOLERANCES[record.precision],
        grad_norm_difference=None,
        grad_norm_tolerance=GRAD_NORM_TOLERANCES[record.precision],
        verdict="unknown",
    )
    if standard:
        before = record.parity.tensors if record.parity and record.parity.reference == standard.trial else None
        parity.tensors = tensors.get((key_of(record), key_of(standard)), before)
        _, losses, expected = from_same_step(record, standard, "losses")
        parity.max_relative_difference = compare_losses(losses, expected)
        # otherwise the first steps of one run would be compared with later steps of the other
        if record.first_step == standard.first_step:
            may_skip = POLICIES[record.precision].scales_loss
            parity.grad_norm_difference = compare_grad_norms(record.grad_norms, standard.grad_norms, may_skip)
    error = None
    if record.losses or standard is not None:
        error = _error(parity, record, standard)
        parity.verdict = "diverged" if error else "equal"
    update = {"parity": parity, "status": "diverged" if error else "ok", "error": error}
    return record.model_copy(update=update)


def _error(parity: Parity, record: RunRecord, standard: RunRecord | None) -> str | None:
    """Return the sentence about the difference between a trial and the standard, or None if the trial is equal."""
    error = _difference(parity, record, standard)
    if error and parity.tensors and parity.tensors.problems:  # which name the place of the difference
        error += f". Its tensors differ: {parity.tensors.problems[0]}"
    if not error:
        error = _difference_of_tensors(parity, record)
    if error and standard and record.num_skipped_steps != standard.num_skipped_steps:
        error += f"; steps skipped (fp16): {record.num_skipped_steps} here, {standard.num_skipped_steps} there"
    return error


def _difference(parity: Parity, record: RunRecord, standard: RunRecord | None) -> str | None:
    if standard is None or parity.max_relative_difference is None:
        return f"its losses are not finite, or not of the same steps as those of {parity.reference}"
    if step := _first_other_learning_rate(record, standard):
        return f"its learning rate differs from that of {parity.reference} from step {step} on"
    first, losses, expected = from_same_step(record, standard, "losses")
    learning_rates = (record.learning_rates or ())[first - record.first_step :]
    are_equal = parity.tensors is not None and not parity.tensors.problems
    if problem := loss_problem(losses, expected, record.precision, first, learning_rates, are_equal):
        return f"its losses differ from those of {parity.reference} {problem}"
    difference, tolerance = parity.grad_norm_difference, parity.grad_norm_tolerance
    if difference is None or tolerance is None or difference <= tolerance:
        return None
    if difference == math.inf:
        return f"its gradient norms, or those of {parity.reference}, are not finite where the others are"
    amount = f"{difference:.2g} of their value, more than {tolerance:g}"
    return f"its gradient norms differ from those of {parity.reference} by {amount}; its losses hide it"


def _difference_of_tensors(parity: Parity, record: RunRecord) -> str | None:
    if problems := record.sketches.problems if record.sketches else []:
        return f"its state is wrong: {problems[0]}"
    if parity.tensors is None or not parity.tensors.problems:
        return None
    return f"its tensors differ from those of {parity.reference}: {parity.tensors.problems[0]}"


def _first_other_learning_rate(record: RunRecord, standard: RunRecord) -> int | None:
    """Return the first step with another learning rate, or None if one of them has no learning rates."""
    if not (record.learning_rates and standard.learning_rates):
        return None
    first, rates, expected = from_same_step(record, standard, "learning_rates")
    differences = relative_differences(rates, expected)
    return next((step for step, one in enumerate(differences, first) if one and one > _SAME_LEARNING_RATE), None)


def _class_of(record: RunRecord) -> str:
    assert record.work_class is not None
    return record.work_class.id
