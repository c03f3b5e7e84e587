"""Losses and gradients that are not finite: how many steps of them are put up with, and what is said."""

import math

import pytest

from megabench.config import RunConfig
from megabench.engines.base import StepResult
from megabench.train.finite import FiniteWatch

GOOD = StepResult(loss=2.0, grad_norm=1.0, num_tokens=1, skipped=False)
BAD_LOSS = StepResult(loss=math.nan, grad_norm=math.inf, num_tokens=1, skipped=True)
BAD_GRADIENTS = StepResult(loss=2.0, grad_norm=math.inf, num_tokens=1, skipped=True)
SPOILED = StepResult(loss=math.inf, grad_norm=math.nan, num_tokens=1, skipped=False)


def reasons(results: list[StepResult], **fields: object) -> list[str | None]:
    """What is said behind each step."""
    watch = FiniteWatch(RunConfig.parse({"model": "llama-tiny", **fields}).resolve(2, "cpu"))
    said = []
    for step, result in enumerate(results, 1):
        losses = [2.0, result.loss]
        wrong = watch.is_wrong(result)
        said.append(watch.reason_to_stop(step, result, losses, ["a", "b"]) if wrong else None)
    return said


@pytest.mark.parametrize("bad", [BAD_LOSS, BAD_GRADIENTS])
@pytest.mark.parametrize("tolerance", [0, 2])
def test_one_too_many(bad: StepResult, tolerance: int) -> None:
    said = reasons([GOOD, *[bad] * (tolerance + 1)], nan_tolerance=tolerance)
    assert said[:-1] == [None] * (tolerance + 1)
    assert said[-1] is not None and f"at step {tolerance + 2} of 100" in said[-1]
    assert ("rank 1 (b)" in said[-1]) == (bad is BAD_LOSS)


def test_only_those_in_a_row_count() -> None:
    assert reasons([BAD_LOSS, BAD_LOSS, GOOD] * 3, nan_tolerance=2) == [None] * 9


def test_weights_that_are_spoiled_are_not_trained_on() -> None:
    (said,) = reasons([SPOILED], nan_tolerance=5)
    assert said is not None and "loss is inf" in said and "the weights were updated with them" in said
