"""Parity: equal losses are equal, a drift is marked, and nothing is compared across work classes."""

import math

import pytest

from megabench.record import RunRecord
from megabench.study.parity import compare_losses, judge_parity
from megabench.study.summary import summarize
from tests.study.records import make_record, work_class

LOSSES = [6.0, 5.0, 4.0]


def test_the_largest_relative_difference_over_steps():
    assert compare_losses([6.0, 5.5, 4.0], LOSSES) == pytest.approx(0.1)
    assert compare_losses(LOSSES, LOSSES) == 0


@pytest.mark.parametrize("losses", [[6.0, 5.0], [6.0, 5.0, 4.0, 3.0], [6.0, None, 4.0], []])
def test_what_cannot_be_compared(losses):
    assert compare_losses(losses, LOSSES) is None


@pytest.mark.parametrize(
    ("precision", "factor", "verdict"),
    [("fp32", 1 + 5e-5, "equal"), ("fp32", 1.001, "diverged"), ("bf16", 1.01, "equal"), ("bf16", 1.1, "diverged")],
)
def test_the_tolerance_is_the_precisions(precision, factor, verdict):
    reference = make_record(LOSSES, trial="zero3", precision=precision)
    other = make_record([loss * factor for loss in LOSSES], trial="tp2", precision=precision)
    other, reference = judge_parity([other, reference], "zero3")
    assert (other.parity.verdict, other.parity.reference) == (verdict, "zero3")
    assert other.status == ("ok" if verdict == "equal" else "diverged")
    assert (reference.parity.verdict, reference.parity.max_relative_difference) == ("equal", 0)


@pytest.mark.parametrize("losses", [[6.0, 5.0], [6.0, math.nan, 4.0], []])
def test_losses_that_cannot_be_compared_are_a_divergence(losses):
    judged, _ = judge_parity([make_record(losses, trial="tp2"), make_record(LOSSES, trial="zero3")], "zero3")
    assert judged.status == "diverged" and judged.parity.max_relative_difference is None
    assert "not finite, or not of the same steps as those of zero3" in judged.error


def test_a_run_that_went_on_is_compared_from_its_first_step():
    reference = make_record([6.0, 5.0, 4.0, 3.0], trial="zero3", grad_norms=[9.0, 8.0, 2.0, 3.0])
    for losses, norms, verdict in (
        ([4.0, 3.0], [2.0, 3.0], "equal"),
        ([4.0, 3.5], [2.0, 3.0], "diverged"),
        ([4.0, 3.0], [2.1, 3.2], "equal"),  # norms of late steps are no measure
        ([4.0], [2.0], "diverged"),
    ):
        later = make_record(losses, trial="tp2", first_step=3, grad_norms=norms)
        judged, standard = judge_parity([later, reference], "zero3")
        assert (judged.parity.verdict, standard.parity.verdict) == (verdict, "equal")
    before = make_record([6.0, 5.0], trial="dp", grad_norms=[9.0, 8.0])
    judged, _ = judge_parity([before, make_record([4.0], trial="zero3", first_step=3)], "zero3")
    assert judged.status == "diverged" and "not of the same steps" in judged.error


NORMS = [2.0, 3.0, 4.0] * 10


def judged_by_norms(precision, norms, **changes):
    losses = LOSSES * 10
    reference = make_record(losses, trial="zero3", precision=precision, grad_norms=NORMS)
    other = make_record(losses, trial="zero2", precision=precision, grad_norms=norms, **changes)
    judged, standard = judge_parity([other, reference], "zero3")
    assert standard.parity.verdict == "equal"
    assert (judged.status == "ok") == (judged.parity.verdict == "equal")
    return judged


@pytest.mark.parametrize(
    ("precision", "norms", "verdict"),
    [
        ("fp32", NORMS, "equal"),
        ("fp32", [norm * 1.0005 for norm in NORMS], "equal"),
        ("fp32", [norm * 1.002 for norm in NORMS], "diverged"),
        ("bf16", [norm * 1.005 for norm in NORMS], "equal"),
        ("bf16", [norm * 1.02 for norm in NORMS], "diverged"),
        ("bf16", NORMS[:1] + [norm * 27 for norm in NORMS[1:]], "diverged"),
        ("bf16", [*NORMS[:9], 130.0, *NORMS[10:]], "diverged"),  # one alone, but of another size
        ("bf16", [*NORMS[:9], NORMS[9] * 1.3, *NORMS[10:]], "equal"),
        ("bf16", NORMS[:10] + [norm * 3 for norm in NORMS[10:]], "equal"),  # amplified rounding: losses judge it
        ("bf16", [*NORMS[:5], None, *NORMS[6:]], "diverged"),
        ("fp16", [*NORMS[:5], None, *NORMS[6:]], "equal"),  # skipped
        ("bf16", [None] * 30, "diverged"),
        ("bf16", [], "equal"),  # a record of a version that kept none
    ],
)
def test_gradient_norms_tell_what_losses_hide(precision, norms, verdict):
    judged = judged_by_norms(precision, norms)
    assert (judged.parity.verdict, judged.parity.max_relative_difference) == (verdict, 0)


def test_a_divergence_of_gradients_is_told():
    judged = judged_by_norms("fp32", [norm * 1.5 for norm in NORMS], num_skipped_steps=2)
    assert judged.error == (
        "its gradient norms differ from those of zero3 by 0.5 of their value, more than 0.001; its losses hide it; "
        "steps skipped (fp16): 2 here, 0 there"
    )
    (row,) = summarize([judged], "zero3")
    assert (row.max_relative_difference, row.grad_norm_difference, row.ratio) == (0, 0.5, None)


def test_norms_that_are_not_finite_are_told():
    error = "its gradient norms, or those of zero3, are not finite where the others are"
    assert judged_by_norms("bf16", [None] * 30).error == error


def test_one_of_several_runs_with_wrong_gradients_marks_the_trial():
    reference = make_record(LOSSES, trial="zero3", grad_norms=[2.0, 3.0, 4.0])
    runs = [make_record(LOSSES, trial="zero2", repeat=n, grad_norms=[2.0 + n, 3.0 + n, 4.0 + n]) for n in range(2)]
    row = next(row for row in summarize(judge_parity([*runs, reference], "zero3"), "zero3") if row.trial == "zero2")
    assert (row.parity, row.status) == ("diverged", "diverged") and row.reason.startswith("1 of 2 runs: ")


def test_a_divergence_by_skipped_steps_says_so():
    skipped = make_record([6.0, 6.0, 5.0], trial="zero1", num_skipped_steps=1)
    drifted = make_record([6.0, 6.0, 5.0], trial="tp2")
    by_skipping, by_drifting, _ = judge_parity([skipped, drifted, make_record(LOSSES, trial="zero3")], "zero3")
    assert by_skipping.error.endswith(
        "up to 0.25 of their value, more than 0.0001; steps skipped (fp16): 1 here, 0 there"
    )
    assert "skipped" not in by_drifting.error


def test_without_the_reference_the_first_good_trial_of_the_class_is_the_standard():
    other_class = work_class(seed=2)
    records = [
        make_record([math.nan] * 3, trial="a", work_class=other_class),
        make_record([9.0, 8.0, 7.0], trial="b", work_class=other_class),
        make_record([9.0, 8.0, 7.0], trial="c", work_class=other_class),
        make_record([], trial="zero3", status="oom", work_class=None),
        make_record(LOSSES, trial="d"),
    ]
    judged = {record.trial: record for record in judge_parity(records, "zero3")}
    assert {name: record.parity and record.parity.reference for name, record in judged.items()} == {
        **dict.fromkeys("abc", "b"),
        "zero3": None,
        "d": "d",
    }
    assert [judged[name].status for name in ("a", "b", "c", "zero3", "d")] == ["diverged", "ok", "ok", "oom", "ok"]


def test_a_verdict_is_taken_back_when_the_standard_changes():
    drifted, standard = make_record([1.0], trial="tp2"), make_record([2.0], trial="zero3")
    (judged, _) = judge_parity([drifted, standard], "zero3")
    assert judged.status == "diverged"
    (judged,) = judge_parity([judged], "zero3")
    assert (judged.status, judged.error, judged.parity.reference) == ("ok", None, "tp2")


def test_a_class_whose_losses_are_all_missing_is_unknown():
    (judged,) = judge_parity([make_record([])], "zero3")
    assert (judged.status, judged.parity.verdict) == ("ok", "unknown")


def test_a_loss_that_is_not_finite_is_a_divergence_after_the_file_too(tmp_path):
    make_record([6.0, math.nan, 4.0], trial="tp2").write(tmp_path / "record.json")
    again = RunRecord.read(tmp_path / "record.json")
    judged, _ = judge_parity([again, make_record(LOSSES, trial="zero3")], "zero3")
    assert judged.status == "diverged"
