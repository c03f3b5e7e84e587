"""Losses and gradients that are not finite: how many steps of them are put up with, and what is said."""

import math

import pytest

from megabench.config import RunConfig
from megabench.engines.base import StepResult
from megabench.train.nan_guard import NanGuard

GOOD = StepResult(loss=2.0, grad_norm=1.0, num_tokens=1, skipped=False)
BAD_LOSS = StepResult(loss=math.nan, grad_norm=math.inf, num_tokens=1, skipped=True)
BAD_GRADIENTS = StepResult(loss=2.0, grad_norm=math.inf, num_tokens=1, skipped=True)
SPOILED = StepResult(loss=math.inf, grad_norm=math.nan, num_tokens=1, skipped=False)
NAN_NORM = StepResult(loss=2.0, grad_norm=math.nan, num_tokens=1, skipped=False)
NON_FINITE = {"weight model.norm.weight": 3, "exp_avg lm_head.weight": 1}


def said(results: list[StepResult], non_finite: dict[str, int] | None = None, **fields: object) -> list[str | None]:
    """What is said behind each step, with "STOP: " in front where the run ends there."""
    watch = NanGuard(RunConfig.parse({"model": "llama-tiny", **fields}).resolve(2, "cpu"))
    sentences: list[str | None] = []
    for step, result in enumerate(results, 1):
        if not watch.is_wrong(result):
            sentences.append(None)
            continue
        stop = "STOP: " if watch.must_stop(result, non_finite or {}) else ""
        sentences.append(stop + watch.describe(step, result, [2.0, result.loss], ["a", "b"], non_finite or {}))
    return sentences


@pytest.mark.parametrize("bad", [BAD_LOSS, BAD_GRADIENTS])
@pytest.mark.parametrize("tolerance", [0, 2])
def test_one_too_many(bad: StepResult, tolerance: int) -> None:
    good, *tolerated, last = said([GOOD, *[bad] * (tolerance + 1)], nan_tolerance=tolerance)
    assert good is None and last is not None and len(tolerated) == tolerance
    assert last.startswith("STOP: ") and f"at step {tolerance + 2} of 100" in last
    for sentence in tolerated:
        assert sentence is not None and not sentence.startswith("STOP: ")
    for sentence in (*tolerated, last):
        assert sentence is not None and ("rank 1 (b)" in sentence) == (bad is BAD_LOSS)
        assert "the weights were not updated, and are finite" in sentence


def test_only_those_in_a_row_count() -> None:
    sentences = said([BAD_LOSS, BAD_LOSS, GOOD] * 3, nan_tolerance=2)
    assert not any(sentence and sentence.startswith("STOP: ") for sentence in sentences)
    assert [sentence is None for sentence in sentences] == [False, False, True] * 3


@pytest.mark.parametrize("bad", [SPOILED, NAN_NORM])
def test_weights_that_are_spoiled_are_not_trained_on(bad: StepResult) -> None:
    (sentence,) = said([bad], nan_tolerance=5)
    assert sentence is not None and sentence.startswith("STOP: ") and "the weights were updated with them" in sentence
    assert ("loss is inf" in sentence) == (bad is SPOILED)


def test_a_state_that_is_not_finite_is_not_trained_on() -> None:
    """The step was skipped, but an earlier update has left NaN: no later step can be better."""
    (sentence,) = said([BAD_LOSS], NON_FINITE, nan_tolerance=5)
    assert sentence is not None and sentence.startswith("STOP: ")
    assert sentence.endswith(
        "the weights were not updated, but 4 values of the training state are NaN or infinite: "
        "weight model.norm.weight (3), exp_avg lm_head.weight (1)"
    )


def test_of_a_state_that_cannot_be_read_nothing_is_said() -> None:
    watch = NanGuard(RunConfig.parse({"model": "llama-tiny"}).resolve(2, "cpu"))
    assert watch.is_wrong(BAD_LOSS) and not watch.must_stop(BAD_LOSS, None)
    assert watch.describe(1, BAD_LOSS, [2.0, math.nan], ["a", "b"], None).endswith("; the weights were not updated")


def test_fp16_may_look_for_its_loss_scale() -> None:
    run = RunConfig.parse({"model": "llama-tiny", "precision": "fp16"}).resolve(2, "cuda")
    watch = NanGuard(run)
    assert not watch.is_wrong(BAD_GRADIENTS)
    assert watch.is_wrong(BAD_LOSS) and watch.is_wrong(NAN_NORM)
