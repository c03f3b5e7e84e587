"""--locate: a trial and the reference run again in fp32 and with the reference kernels."""

from pathlib import Path
from typing import Any

import pytest

from megabench.record import Parity, TensorParity
from megabench.study.locate import located, locating_file
from megabench.study.study import StudyError, StudyFile, plan_study
from tests.study.records import make_record

LOSSES = [6.0, 5.0]


def study_of(*trials: dict[str, Any], **base: Any) -> Any:
    base = {"model": "llama-tiny", "device": "cpu", "world_size": 2, "steps": 20, "precision": "bf16"} | base
    file = StudyFile(base=base, trials=list(trials), reference="zero3")
    return plan_study(file, Path("s.yaml"), 2, "cpu")


ZERO3 = {"name": "zero3", "engine": "deepspeed"}
TP2 = {"name": "tp2", "tp": 2, "env": {"A": "1"}, "micro_batch": "auto"}


def test_the_pair_runs_in_three_ways():
    file = locating_file(study_of(ZERO3, TP2), "tp2")
    planned = plan_study(file, Path("s.yaml"), 2, "cpu")
    assert [trial.name for trial in planned.trials] == [
        f"{name}-{way}" for way in ("fp32", "reference-kernels", "as-it-is") for name in ("zero3", "tp2")
    ]
    assert [trial.resolved.precision for trial in planned.trials] == ["fp32"] * 2 + ["bf16"] * 4
    assert [trial.resolved.kernels for trial in planned.trials] == ["auto"] * 2 + ["reference"] * 2 + ["auto"] * 2
    assert planned.reference == "zero3-fp32"
    tp2 = planned.trials[1]
    assert tp2.env == {"A": "1"} and tp2.config.tp == 2 and tp2.resolved.steps == 4
    assert not tp2.config.auto_settings, "no short runs are needed"
    assert all(trial.resolved.why_no_sketches is None for trial in planned.trials)


def test_settings_that_need_other_steps_or_fp8_are_left_out():
    long = study_of(ZERO3, TP2, schedule="wsd", decay_steps=10, steps=40)
    assert len(locating_file(long, "tp2").trials) == 6
    fp8 = study_of({"name": "zero3", "tp": 1}, TP2, precision="fp8", num_layers_at_start_in_bf16=1)
    assert locating_file(fp8, "tp2").trials[0]["name"] == "zero3-fp32"


def test_equal_ways_run_once():
    file = locating_file(study_of(ZERO3, TP2, precision="fp32", kernels="reference"), "tp2")
    assert [trial["name"] for trial in file.trials] == ["zero3-fp32", "tp2-fp32"]


@pytest.mark.parametrize(
    ("name", "words"), [("zero3", "is the reference"), ("*", "matches 2 trials"), ("tp4", "matches no trial")]
)
def test_one_trial_is_located(name: str, words: str):
    with pytest.raises(StudyError, match=words):
        locating_file(study_of(ZERO3, TP2), name)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("fp32", "In fp32, tp2-fp32 differs, so this is not rounding: lm_head"),
        ("reference-kernels", "equal in fp32. With the reference kernels, tp2-reference-kernels differs: lm_head"),
        ("as-it-is", "With the trial's own kernels, tp2-as-it-is differs, so a kernel is the cause: lm_head"),
        (None, "This is rounding: the tensors of the first steps are equal in fp32 and with the reference kernels and"),
    ],
)
def test_the_conclusion(way: str | None, words: str):
    tensors = TensorParity(num_tensors=21, largest="lm_head", part_of_tolerance=0.5)
    parity = Parity(
        reference="zero3-fp32", max_relative_difference=0.0, tolerance=1.0, tensors=tensors, verdict="equal"
    )
    records = []
    for each in ("fp32", "reference-kernels", "as-it-is"):
        bad: dict[str, Any] = {"status": "diverged", "error": "lm_head"} if each == way else {}
        records.append(make_record(LOSSES, trial=f"zero3-{each}"))
        records.append(make_record(LOSSES, trial=f"tp2-{each}", parity=parity, **bad))
    assert words in located(records)
    assert located(records[:1]) == "Not known: the runs wrote no sketches of their tensors."
    records[0] = make_record([], trial="zero3-fp32", status="oom", work_class=None)
    assert located(records).startswith("Not known: zero3-fp32 ran out of memory.")
