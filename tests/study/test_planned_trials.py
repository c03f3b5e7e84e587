"""`compare --plan N`: which trials it adds, what records carry, what the end says."""

from dataclasses import replace
from pathlib import Path

import pytest

from megabench.cost.profile import shipped_profiles
from megabench.doctor import examine
from megabench.errors import UserError
from megabench.planner.predict import Predictor
from megabench.record import EmulatedNetworkUsed, Prediction, RunRecord
from megabench.report import StudyRecords, write_report
from megabench.study.compare_request import Request
from megabench.study.planned_trials import Planning, regret_sentence
from megabench.study.study import StudyError, StudyFile
from tests.comparison.compare_process import REAL, compare
from tests.planner.jobs import hosts
from tests.study.records import make_record

STUDY = """
base: {model: llama-tiny, steps: 4, warmup_steps: 1, device: cpu}
trials:
  - {name: zero3, engine: deepspeed, micro_batch: 2}
  - {name: mine, engine: fsdp, micro_batch: 8}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile of a machine without GPUs, as calibrate makes it."""
    generic = shipped_profiles()["generic"]
    path = tmp_path / "here.json"
    path.write_text(
        generic.model_copy(
            update={"peak_tflops": {"fp32": 0.1}, "memory_gib": 64.0, "kind": "measured"}
        ).model_dump_json()
    )
    return path


def test_the_best_predicted_run_behind_a_studys_own(study: Path, profile: Path):
    planned, size = Request(study, study.parent / "out", planning=Planning(3, profile=profile)).plan_here(2)
    names = [trial.name for trial in planned.trials]
    assert size == 2 and names[:2] == ["zero3", "mine"]
    assert set(names[2:]) <= {"plan-1", "plan-2", "plan-3"} and len(names) >= 4
    assert planned.reference == "zero3"
    assert planned.predictor and list(planned.predictor.planned) == names[2:]
    assert planned.as_run and StudyFile.read(_written(study, planned.as_run)).trials[0]["name"] == "zero3"


def _written(study: Path, text: str) -> Path:
    path = study.with_name("as-run.yaml")
    path.write_text(text)
    return path


def test_a_layout_that_the_study_has_is_not_added_again(study: Path, profile: Path):
    first, _ = Planning(1, profile=profile).extend(StudyFile.read(study), study, 2)
    best = {name: value for name, value in first.trials[-1].items() if name != "name"}
    study.write_text(STUDY + f"  - {best}\n")
    again, predictor = Planning(1, profile=profile).extend(StudyFile.read(study), study, 2)
    assert len(again.trials) == 3 and list(predictor.planned) == []


def test_the_same_layout_on_fewer_ranks_is_another(study: Path, profile: Path):
    first, _ = Planning(1, profile=profile).extend(StudyFile.read(study), study, 2)
    best = {name: value for name, value in first.trials[-1].items() if name != "name"}
    study.write_text(STUDY + f"  - {best | {'world_size': 1}}\n")
    again, predictor = Planning(1, profile=profile).extend(StudyFile.read(study), study, 2)
    assert len(again.trials) == 4 and list(predictor.planned) == ["plan-1"]


def test_a_limited_network_of_emulated_hosts_slows_the_predictions(study: Path, profile: Path) -> None:
    seconds = []
    for limit in (None, 4.0, 0.1):
        network = f", emulate_network: {{gb_per_s: {limit}}}" if limit else ""
        study.write_text(STUDY.replace("device: cpu", f"device: cpu, emulate_hosts: 2{network}"))
        planned, _ = Request(study, study.parent, planning=Planning(1, profile=profile)).plan_here(2, starts=False)
        used = EmulatedNetworkUsed(gb_per_s=limit, latency_us=0) if limit else None
        record = make_record([5.0], engine="ddp", emulated_hosts=2, emulated_network=used)
        seconds.append(planned.predictor.predict(record).step_seconds)
        assert {host.network_gbits for host in planned.predictor.topology.hosts} == {limit and limit * 8}
        assert planned.predictor.predict(make_record([5.0], engine="ddp")).step_seconds == seconds[0]
    assert seconds[0] < seconds[1] < seconds[2], "the profile's sockets reach 5.3 GB/s"


def test_a_plan_whose_trials_are_not_selected_is_refused(study: Path, profile: Path) -> None:
    request = Request(study, study.parent / "out", only=("zero3",), planning=Planning(3, profile=profile))
    with pytest.raises(StudyError, match=r"--only selects none of the \d trials that --plan added"):
        request.plan_here(2)
    both = replace(request, only=("zero3", "plan-*"))
    assert len(both.plan_here(2)[0].trials) >= 4


def test_a_plan_for_other_machines_is_refused(study: Path):
    with pytest.raises(StudyError, match="has 16 GPUs, and the launch 2 processes"):
        Planning(1, cluster="p5.48xlarge:2").extend(StudyFile.read(study), study, 2)


def predicted(record: RunRecord, seconds: float, rank: int | None = None) -> RunRecord:
    record.prediction = Prediction(
        step_seconds=seconds,
        tokens_per_second_per_device=1.0,
        peak_memory_gib=1.0,
        profile="here",
        relative_error=0.1,
        planned_rank=rank,
    )
    return record


def records() -> list[RunRecord]:
    slow = make_record([5.0, 4.0], trial="plan-1", step_seconds={"median": 2.2, "p10": 2.0, "p90": 2.4, "all": [2.2]})
    fast = make_record([5.0, 4.0], trial="zero3", step_seconds={"median": 2.0, "p10": 2.0, "p90": 2.0, "all": [2.0]})
    return [predicted(slow, 1.1, 1), predicted(fast, 3.0)]


def test_the_end_says_whether_the_plan_was_right():
    sentence = regret_sentence(records())
    assert sentence and "would have chosen plan-1" in sentence
    assert "is zero3 (regret 1.10)" in sentence and "off by 50%" in sentence
    assert regret_sentence([make_record([5.0])]) is None


def test_a_repeated_trial_is_one():
    faster, slower = (record for record in [*records(), *records()] if record.trial == "plan-1")
    other = next(record for record in records() if record.trial == "zero3")
    slower = slower.model_copy(update={"repeat": 1})
    assert slower.step_seconds and other.step_seconds
    slower.step_seconds = slower.step_seconds.model_copy(update={"median": 0.1 * other.step_seconds.median})
    sentence = regret_sentence([faster, slower, other])
    assert sentence and "plan-1, the best that was measured (regret 1.00)" in sentence


def test_a_record_is_predicted_for_the_ranks_it_ran_on():
    # a fast host, which does not limit the step of this small model
    profile = shipped_profiles()["h100"].model_copy(update={"launch_seconds": 1e-9, "collective_launch_seconds": 1e-9})
    predictor = Predictor(hosts(1, 2), profile, ["plan-1"])
    said = predictor.predict(make_record([5.0], trial="plan-1", precision="bf16"))
    assert said and said.step_seconds > 0 and said.planned_rank == 1 and said.profile == "h100"
    assert predictor.predict(make_record([5.0], world_size=4)) is None
    traits = {"flash_attention": False, "fused_activation": False}
    eager = predictor.predict(make_record([5.0], precision="bf16", kernel_traits=traits))
    assert eager and eager.step_seconds > said.step_seconds and eager.peak_memory_gib > said.peak_memory_gib
    sgd = predictor.predict(make_record([5.0], precision="bf16", optimizer="sgd"))
    assert sgd and sgd.peak_memory_gib < said.peak_memory_gib
    assert predictor.predict(make_record([5.0], model="unheard-of")) is None


def test_the_report_draws_predicted_against_measured(tmp_path: Path):
    page = tmp_path / "report.html"
    said = tuple(records())
    write_report(page, StudyRecords("planned", "", "zero3", said), examine(said, "zero3"))
    text = page.read_text()
    assert "Predicted against measured" in text and "-50.0%" in text and "would have chosen plan-1" in text
    plain = (make_record([5.0], trial="zero3"),)
    write_report(page, StudyRecords("plain", "", "zero3", plain), examine(plain, "zero3"))
    assert "Predicted against measured" not in page.read_text()


@pytest.mark.e2e
def test_compare_with_a_plan_ends_in_its_regret(study: Path, profile: Path, tmp_path: Path):
    out = tmp_path / "out"
    status, shown, errors = compare(study, "--out", out, "--nproc", 2, "--plan", 2, "--profile", profile)
    assert status == 0, errors
    assert "The plan would have chosen" in shown and "plan-1" in (out / "study.yaml").read_text()
    # the study as run is a study, without its plan
    again = [*map(str, ("--out", out, "--nproc", 2, "--resume"))]
    assert compare(out / "study.yaml", *again)[0] == 0


@pytest.mark.e2e
def test_plan_options_without_a_plan_are_refused(study: Path, tmp_path: Path):
    status, _, errors = compare(study, "--out", tmp_path / "out", "--cluster", "p5.48xlarge:2", command=REAL)
    assert status == 2 and "--cluster works only with --plan N" in errors


def test_layouts_are_planned_in_the_precision_of_the_study(study: Path, profile: Path):
    study.write_text(STUDY.replace("device: cpu", "device: cpu, precision: fp8"))
    with pytest.raises(UserError, match=r"peak of .* in fp8 is unknown"):
        Planning(1, profile=profile).extend(StudyFile.read(study), study, 2)
