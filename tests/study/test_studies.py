"""The studies that come with the project can be planned, say what they answer, and have a small twin for CPU."""

from pathlib import Path

import pytest

from megabench.study.study import Study, StudyFile, plan_study
from tests.comparison.compare_process import REPOSITORY

STUDIES = {path.stem: path for path in sorted((REPOSITORY / "configs/studies").glob("*.yaml"))}
LARGE = [name for name in STUDIES if f"{name}-small" in STUDIES]


def plan(path: Path, num_processes: int) -> Study:
    file = StudyFile.read(path)
    return plan_study(file, path, num_processes, "cpu" if file.is_cpu_only else "cuda")


def test_the_users_studies_are_there() -> None:
    assert LARGE == [
        "bloom-7b1-scale",
        "crossover-efa",
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
