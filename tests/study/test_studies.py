"""The studies that come with the project can be planned, say what they answer, and have a small twin for CPU."""

from pathlib import Path

import pytest

from megabench.config.record_fields import requested_fields
from megabench.record import EmulatedNetworkUsed, LinkBandwidth, RunRecord
from megabench.study.crossover import Crossover
from megabench.study.study import Study, StudyFile, plan_study
from megabench.study.summary import summarize
from tests.comparison.compare_process import REPOSITORY
from tests.study.records import work_class

STUDIES = {path.stem: path for path in sorted((REPOSITORY / "configs/studies").glob("*.yaml"))}
LARGE = [name for name in STUDIES if f"{name}-small" in STUDIES]


def plan(path: Path, num_processes: int) -> Study:
    file = StudyFile.read(path)
    return plan_study(file, path, num_processes, "cpu" if file.is_cpu_only else "cuda")


def test_the_users_studies_are_there() -> None:
    assert LARGE == [
        "bloom-7b1-scale",
        "crossover-efa",
        "crossover",
        "gpt2-zero",
        "hf-trainer-offload-a",
        "hf-trainer-offload-b",
        "llama3-8b-four-hosts",
        "llama3-8b-fp8",
        "llama3-8b-nvlink",
        "llama3-8b-topology",
        "llama3-8b-two-hosts",
        "qwen3-0.6b-dp",
    ]


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_can_be_planned_and_says_what_it_answers(name: str) -> None:
    num_processes = StudyFile.read(STUDIES[name]).largest_world_size or 4
    study = plan(STUDIES[name], num_processes)
    assert study.question.endswith("?")
    assert STUDIES[name].read_text().startswith("# "), "who reads the file learns what it is for"
    num_hosts = 2 if name.startswith("crossover-efa") else 1
    assert num_processes <= 8 * num_hosts, "hosts have no more GPUs"


@pytest.mark.parametrize("name", LARGE)
def test_a_small_twin_runs_on_a_laptop_and_has_the_kinds_of_trial_of_the_large(name: str) -> None:
    num_processes = StudyFile.read(STUDIES[name]).largest_world_size or 4
    large, small = plan(STUDIES[name], num_processes), plan(STUDIES[f"{name}-small"], 4)
    assert all(trial.resolved.device == "cpu" and trial.resolved.shape.num_parameters < 3e6 for trial in small.trials)
    kinds = [{trial.resolved.engine for trial in study.trials} for study in (large, small)]
    assert kinds[0] == kinds[1]
    emulates = [{bool(trial.resolved.emulate_hosts) for trial in study.trials} for study in (large, small)]
    assert emulates[0] == emulates[1]


def test_the_crossover_study_measures_the_steps_that_are_predicted_to_take_at_most_a_minute() -> None:
    """The planned trials are taken for records without a result, so that the crossover predicts all of them."""
    study = plan(STUDIES["crossover"], 2)
    work = work_class(model="llama3-8b", num_layers=12, precision="bf16", seq_length=4096)
    records = [
        RunRecord(
            **requested_fields(trial.resolved, trial.config),
            trial=trial.name,
            work_class=work,
            status="ok",
            num_hosts=trial.resolved.emulate_hosts or 1,
            device="NVIDIA H100 80GB HBM3",
            emulated_network=EmulatedNetworkUsed(gb_per_s=limit.gb_per_s, latency_us=0) if limit else None,
            link_bandwidth=None if limit else LinkBandwidth(all_gather_gb_per_s=6, send_recv_gb_per_s=6, num_bytes=1),
        )
        for trial in study.trials
        for limit in [trial.resolved.emulate_network]
    ]
    found = Crossover(summarize(records, study.reference), records)
    assert [place.gb_per_s for place in found.places] == [0.75, 1.5, 3, 6, 450]
    assert (found.baselines, found.methods) == (["ZeRO-3", "FSDP2"], ["DP2", "PP2·VP2", "TP2"])
    has_trial = {found.cell(record) for record in records}
    seconds = {cell: found.predicted_seconds(*cell) for cell in found.not_measured}
    assert len(seconds) == 3 * 5 * 5, "every layout has a prediction with every batch on every network"
    assert {cell: time for cell, time in seconds.items() if (time <= 60) != (cell in has_trial)} == {}
    assert len(records) <= 75, "the study takes hours"
