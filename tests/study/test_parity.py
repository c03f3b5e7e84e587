"""Parity: equal losses are equal, a drift is marked, and nothing is compared across work classes."""

import gzip
import json
import math
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from megabench.record import RunRecord, Sketches, TensorParity
from megabench.study.parity import compare_losses, judge_parity, key_of, loss_problem
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


def _curves() -> dict[tuple[str, str], dict[str, Any]]:
    """The losses that tools/rounding_growth.py measured, by setting and change."""
    with gzip.open(Path(__file__).with_name("loss_curves.jsonl.gz"), "rt", encoding="utf-8") as lines:
        return {(curve["setting"], curve["change"]): curve for curve in map(json.loads, lines)}


CURVES = _curves()
ROUNDING = ("unchanged", "last bit 1", "last bit 2")
ERRORS = sorted(key for key in CURVES if key[1] not in ROUNDING)


def judge_curves(setting: str, change: str, reference: str) -> RunRecord:
    curves = {"mine": CURVES[setting, change], "zero3": CURVES[setting, reference]}
    records = [
        make_record(curve["losses"], trial=name, precision=curve["precision"], grad_norms=curve["grad_norms"])
        for name, curve in curves.items()
    ]
    return judge_parity(records, "zero3")[0]


@pytest.mark.parametrize("setting", sorted({setting for setting, _ in CURVES}))
def test_rounding_that_training_amplifies_is_equal(setting):
    for change, reference in permutations(ROUNDING, 2):
        judged = judge_curves(setting, change, reference)
        assert judged.parity.verdict == "equal", f"{change} against {reference}: {judged.error}"


def test_some_rounding_grows_beyond_the_tolerance():
    grown = [
        judge_curves(setting, "last bit 1", "unchanged").parity
        for setting in ("llama", "gpt2", "llama, 300 steps", "llama, lr 1e-2", "llama, bf16")
    ]
    assert all(parity.max_relative_difference > parity.tolerance for parity in grown)


# Errors that the losses alone do not show. In fp32, rounding has grown to their size when they begin. In bf16, they
# stay smaller than the differences that rounding causes.
HIDDEN = {
    *((setting, "no decay from step 100") for setting in ("llama", "qwen3", "llama, seed 7", "gpt2", "llama, bf16")),
    *((setting, "other sequence at step 60") for setting in ("llama", "gpt2", "llama, bf16")),
    *((setting, change) for setting, change in ERRORS if "bf16" in setting and change.startswith("unreduced")),
}


@pytest.mark.parametrize(("setting", "change"), [key for key in ERRORS if key not in HIDDEN])
def test_a_real_error_diverges_even_with_rounding(setting, change):
    for reference in ROUNDING:
        judged = judge_curves(setting, change, reference)
        assert judged.status == "diverged" and "losses differ from those of zero3 by" in judged.error, reference


def test_an_error_that_begins_late_is_told_with_its_step():
    judged = judge_curves("llama, lr 3e-4", "other sequence at step 60", "last bit 1")
    assert judged.error == (
        "its losses differ from those of zero3 by 0.011 of their value at step 60, more than the 0.0001 to which "
        "rounding can grow until then"
    )
    judged = judge_curves("llama, lr 3e-4", "no decay from step 100", "last bit 1")
    assert re.fullmatch(
        r"its losses differ from those of zero3 by 0.02 of their mean over steps \d+ to \d+, more than 0.02",
        judged.error,
    )


def test_an_error_that_warm_up_hides_is_no_rounding():
    expected = [5.0] * 400
    drift = [5.0 * (1 + 1e-9 * step**2) for step in range(400)]  # 1e-7 after 10 steps, 1.6e-4 after 400
    for num_warm_up, verdict in ((0, "equal"), (300, "diverged")):
        rates = [min(1.0, (step + 1) / max(num_warm_up, 1)) for step in range(400)]
        records = [
            make_record(losses, trial=trial, precision="fp32", learning_rates=rates)
            for trial, losses in (("mine", drift), ("zero3", expected))
        ]
        assert judge_parity(records, "zero3")[0].parity.verdict == verdict, num_warm_up


def test_other_learning_rates_diverge_from_their_first_step_on():
    rates = [3e-3 * (1 - step / 400) for step in range(200)]
    wrong = [*rates[:99], *[rates[99]] * 101]
    reference = make_record(CURVES["llama", "last bit 1"]["losses"], trial="zero3", learning_rates=rates)
    losses = CURVES["llama", "no decay from step 100"]["losses"]
    mine, resumed, right, old = (
        make_record(losses[first - 1 :], trial=trial, learning_rates=own and own[first - 1 :], first_step=first)
        for trial, own, first in (("mine", wrong, 1), ("resumed", wrong, 21), ("right", rates, 1), ("old", None, 1))
    )
    judged = judge_parity([mine, resumed, right, old, reference], "zero3")
    error = "its learning rate differs from that of zero3 from step 101 on"
    assert [record.error for record in judged[:2]] == [error, error]
    assert all("learning rate" not in (record.error or "") for record in judged[2:])


def test_a_difference_counts_from_the_first_steps():
    """A start above rounding, such as an unreduced gradient, gets the tolerance at every step."""
    expected = [2.0] * 40
    grown = [2.0] * 10 + [2 * (1 + 1e-6 * 1.4**step) for step in range(30)]
    assert loss_problem(grown, expected, "fp32") is None
    grown[3] = 2 * (1 + 5e-6)
    assert loss_problem(grown, expected, "fp32") == "by up to 0.017 of their value, more than 0.0001"
    assert loss_problem([2.0] * 30 + [2.001] * 10, expected, "fp32", first_step=11) == (
        "by 0.0005 of their value at step 41, more than the 0.0001 to which rounding can grow until then"
    )


def _run(trial: str, losses: list[Any] = LOSSES, **changes: Any) -> RunRecord:
    return make_record(losses, trial=trial, trial_id=trial, **changes)


def _tensors(*problems: str) -> TensorParity:
    return TensorParity(num_tensors=21, largest="the gradient of a", part_of_tolerance=0.5, problems=list(problems))


def test_tensors_tell_what_losses_and_norms_hide():
    reference, other = _run("zero3"), _run("tp2")
    problem = "1 of 21 gradients of step 1 differ"
    pair = key_of(other), key_of(reference)
    judged = judge_parity([reference, other], "zero3", {pair: _tensors(problem)})
    assert [record.status for record in judged] == ["ok", "diverged"]
    assert judged[1].error == f"its tensors differ from those of zero3: {problem}"
    equal = judge_parity([reference, other], "zero3", {pair: _tensors()})
    assert [record.status for record in equal] == ["ok", "ok"]
    assert summarize(equal, "zero3")[1].num_tensors_compared == 21


def test_a_difference_of_losses_is_placed_by_the_tensors():
    reference, other = _run("zero3"), _run("tp2", [6.0, 9.0, 4.0])
    _, judged = judge_parity([reference, other], "zero3", {(key_of(other), key_of(reference)): _tensors("lm_head")})
    assert (
        judged.error and judged.error.startswith("its losses differ") and "Its tensors differ: lm_head" in judged.error
    )


def test_a_comparison_of_tensors_stays_only_with_its_reference():
    first, second = _run("zero3"), _run("ddp")
    other = _run("tp2")
    compared = judge_parity([first, second, other], "zero3", {(key_of(other), key_of(first)): _tensors("lm_head")})
    assert judge_parity(compared, "zero3")[2].status == "diverged"
    assert judge_parity(compared, "ddp")[2].status == "ok"


def test_a_run_whose_ranks_disagree_has_diverged():
    sketches = Sketches(num_tensors=21, num_bytes=1, seconds=1.0, problems=["The copies of the weight of a differ."])
    reference, other = _run("zero3"), _run("tp2", sketches=sketches)
    _, judged = judge_parity([reference, other], "zero3")
    assert judged.error == "its state is wrong: The copies of the weight of a differ."


def test_equal_tensors_leave_rounding_ten_steps():
    """During warm-up, losses prove little about the optimizer, unless its updates were compared."""
    rates = [min(1.0, step / 10) for step in range(1, 41)]
    losses = [5.0] * 40
    grown = [5.0 * (1 + (0 if step < 12 else min(4e-6 * 1.6 ** (step - 12), 5e-3))) for step in range(1, 41)]
    reference = _run("zero3", losses, learning_rates=rates)
    other = _run("ddp", grown, learning_rates=rates)
    pair = key_of(other), key_of(reference)
    assert [judge_parity([reference, other], "zero3", tensors)[1].status for tensors in ({}, {pair: _tensors()})] == [
        "diverged",
        "ok",
    ]
