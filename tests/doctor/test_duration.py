"""The predicted duration of a study, and that the studies for EFA end before their job does."""

import json
import re
from dataclasses import replace
from datetime import datetime
from itertools import pairwise

import pytest

from megabench.config.clusters import read_cluster
from megabench.doctor.duration import SECONDS_TO_START, predicted_duration
from megabench.doctor.plan_rules import place_trial
from megabench.doctor.predicted_trials import Predictions, predict
from megabench.errors import UserError
from megabench.study.study import StudyFile, Trial, plan_study
from tests.comparison.compare_process import REPOSITORY
from tests.golden.behaviour import run

MEASURED = ("llama3-8b-nvlink-copy-engines", "llama3-8b-nvlink-fp8", "llama3-8b-nvlink-repeats")
EFA = {"crossover-efa": "p5.48xlarge:2", "crossover-efa-40gb": "p4d.24xlarge:2"}
TWO_GPUS = ("crossover", "p5.48xlarge:1:2", 2)
MOST_STEP_ERROR = 1.25  # twice the error of the planner's profiles


def trials_of(name: str, num_processes: int = 16) -> list[Trial]:
    source = REPOSITORY / f"configs/studies/{name}.yaml"
    return [*plan_study(StudyFile.read(source), source, num_processes, "cuda").trials]


def test_most_measured_runs_of_the_whole_model_start_in_this_time() -> None:
    seconds = []
    for name in MEASURED:
        lines = (REPOSITORY / f"benchmarks/{name}/results.jsonl").read_text().splitlines()
        runs = sorted((json.loads(line) for line in lines), key=lambda run: run["ended_at"])
        for before, after in pairwise(runs):
            between = datetime.fromisoformat(after["ended_at"]) - datetime.fromisoformat(before["ended_at"])
            seconds.append(between.total_seconds() - after["num_steps"] * after["step_seconds"]["median"])
    assert len(seconds) >= 20
    assert sorted(seconds)[int(0.9 * len(seconds))] <= SECONDS_TO_START


@pytest.mark.parametrize("name", EFA)
def test_a_study_for_efa_fits_into_its_job(name: str) -> None:
    """The job starts, stops two minutes before its limit if needed, and fits if steps are slower than predicted."""
    script = (REPOSITORY / "launch/crossover-efa.sbatch").read_text()
    limit, before = (int(re.search(pattern, script)[1]) for pattern in (r"--time (\d+)", r"USR1@(\d+)"))
    trials, topology = trials_of(name), read_cluster(EFA[name])
    predictions = Predictions()
    predicted = [predict(place_trial(trial, topology), predictions) for trial in trials]
    steps = [one.trial.run.steps * one.estimate.step_seconds for one in predicted if one]
    assert len(steps) == len(trials) and all(one and one.estimate.fits for one in predicted)
    total = MOST_STEP_ERROR * sum(steps) + SECONDS_TO_START * (len(trials) + 1)  # the job itself starts, too
    assert limit == 30 and total <= 60 * limit - before
    for trial, seconds in zip(trials, steps, strict=True):
        assert trial.timeout_seconds >= 1.5 * (seconds + SECONDS_TO_START)


@pytest.mark.parametrize(("name", "cluster", "num_processes"), [*((*one, 16) for one in EFA.items()), TWO_GPUS])
def test_studies_have_the_fastest_settings_that_fit(name: str, cluster: str, num_processes: int) -> None:
    """No micro-batch and recomputation that fits is faster by 1%, except for the trials that the comment names."""
    topology, predictions = read_cluster(cluster), Predictions()
    for trial in trials_of(name, num_processes):
        placed = place_trial(trial, topology)
        auto = placed.given.model_copy(update={"micro_batch": "auto", "recompute": "auto"})
        own, best = predict(placed, predictions), predict(replace(placed, given=auto), predictions)
        assert own and best
        assert own.estimate.fits != trial.name.startswith("fsdp-regather"), trial.name
        assert own.gain(best.estimate) < 1.01, trial.name


@pytest.mark.parametrize("name", EFA)
def test_a_study_for_efa_asks_the_crossover_question(name: str) -> None:
    trials = trials_of(name)
    for batch in (16, 64, 256):
        here = [trial.resolved for trial in trials if trial.resolved.global_batch == batch]
        layouts = {(run.engine, run.layout.tp > 1, run.layout.pp) for run in here}
        assert {("megatron", False, 2), ("megatron", True, 1), ("megatron", True, 2)} < layouts
        assert {("deepspeed", False, 1), ("fsdp", False, 1)} < layouts
        assert all(run.layout.tp <= 8 and run.model == "llama3-8b" and run.seq_length == 4096 for run in here)
    assert sum(trial.resolved.global_batch in (16, 64, 256) for trial in trials) == len(trials)


def test_misfits_auto_settings_and_unknown_trials_are_named() -> None:
    said = predicted_duration(trials_of("crossover-efa"), read_cluster(EFA["crossover-efa-40gb"]))
    assert "May not fit into memory: zero3-kept-gbs16" in said and "are not predicted" not in said
    said = predicted_duration(trials_of("llama3-8b-four-hosts", 4), read_cluster("p5e.48xlarge:1:4"))
    assert said.endswith("Short runs for settings that are auto are not counted.")
    said = predicted_duration(trials_of("crossover-efa-small"), read_cluster(EFA["crossover-efa"]))
    assert "The steps of zero3-kept, zero3-hpz, hsdp, pp2-across, tp2-dp2, tp2-pp2-across are not predicted" in said


def test_commands_are_for_the_hosts_of_a_cluster() -> None:
    source = REPOSITORY / "configs/studies/crossover-efa.yaml"
    study = plan_study(StudyFile.read(source), source, 16, "cuda")
    on = {
        where: study.outline(["tp2-dp8-gbs16"], read_cluster(where)) for where in ("p5.48xlarge:2", "p5.48xlarge:4:4")
    }
    assert ": torchrun --nproc-per-node 16 -m " in study.outline(["tp2-dp8-gbs16"])
    assert ": torchrun --nnodes 2 --nproc-per-node 8 --rdzv" in on["p5.48xlarge:2"]
    assert ": torchrun --nnodes 4 --nproc-per-node 4 --rdzv" in on["p5.48xlarge:4:4"]
    with pytest.raises(UserError, match="needs 16 processes, but the cluster has 8 GPUs"):
        predicted_duration(study.trials, read_cluster("p5.48xlarge:1"))
    source = REPOSITORY / "configs/studies/crossover.yaml"
    emulated = plan_study(StudyFile.read(source), source, 2, "cuda").outline(["tp2-*"], read_cluster("p5.48xlarge:2"))
    assert emulated.count(": torchrun --nproc-per-node 2 -m ") == len(emulated.splitlines()) - 1


def test_dry_run_predicts_on_a_cluster() -> None:
    said = run(["-m", "megabench", "compare", "crossover-efa", "--dry-run", "--cluster", "p5.48xlarge:2"])
    assert said.startswith("exit status 0\n") and said.splitlines()[-1].endswith(" s to start each of 20 runs.")
    assert (
        said.count(": torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m ") == 20
    )
    one = run(
        [
            "-m",
            "megabench",
            "compare",
            "crossover-efa",
            "--dry-run",
            "--cluster",
            "p5.48xlarge:2",
            "--only",
            "tp2-dp8-*",
        ]
    )
    assert " s to start each of 3 runs." in one
