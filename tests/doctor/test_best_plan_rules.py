"""Trials of a planned study that do not fit, and layouts of the plan that beat all trials."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megabench.cli.commands import app
from megabench.config import RunConfig
from megabench.cost.job import Candidate, Job
from megabench.cost.memory import LIKELY
from megabench.cost.profile import profile_for
from megabench.doctor import Finding
from megabench.doctor.predicted_trials import PredictedTrial
from megabench.doctor.write_findings import findings_at
from megabench.models.find import find_model
from megabench.parallel.layout import Layout
from megabench.planner.engines.sharding import Sharding
from megabench.planner.search import Plan, plan, settings_of
from megabench.study.planned_trials import COMPARED
from tests.doctor.test_fabric_rules import written
from tests.planner.jobs import cluster, costs

P4D, P5 = "p4d.24xlarge:1", "p5.48xlarge:2"
BASE = "model: llama3-8b, global_batch: 64, seq_length: 4096"
TOO_LARGE = "{engine: deepspeed, zero_stage: 3}, {tp: [1, 2], pp: 2}, {tp: 2}, {engine: ddp}"


def study(folder: Path, trials: str, base: str = BASE) -> Path:
    path = folder / "study.yaml"
    path.write_text(f"base: {{{base}}}\ntrials: [{trials}]\nrepeats: 3\n")
    return path


def of_memory(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.what.endswith("run out of GPU memory")]


def of_plans(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.what.startswith("the plan has a layout")]


def planned(where: str, global_batch: int = 64, **settings: Any) -> Plan:
    topology = cluster(where)
    work = Job(find_model("llama3-8b"), 4096, global_batch, **settings)
    return plan(work, topology, profile_for(topology.hosts[0].device))


def recommended(finding: Finding, base: str = BASE) -> RunConfig:
    """The run of the trial that a finding recommends."""
    found = re.search(r"\{.*\}", finding.change)
    assert found
    settings = yaml.safe_load(f"{{{base}}}") | yaml.safe_load(found[0])
    return RunConfig.parse({name: value for name, value in settings.items() if name != "world_size"})


def check_recommends(finding: Finding, found: Plan, base: str = BASE) -> None:
    """The finding names the first layout of the plan, with its step time and with settings that train it."""
    best = found.ranked[0]
    assert best.candidate.name in finding.evidence + finding.change
    assert f"{best.step_seconds:.3g} s per step" in finding.evidence + finding.change
    run, size = recommended(finding, base), found.topology.world_size
    assert run.resolve(size, "cuda").layout == best.candidate.layout
    expected = RunConfig.parse(settings_of(best.candidate)).every()
    assert {name: run.every()[name] for name in COMPARED} == {name: expected[name] for name in COMPARED}


def test_trials_that_do_not_fit_come_first_with_the_layout_that_does(tmp_path):
    first, *others = findings_at(study(tmp_path, TOO_LARGE), cluster=P4D)
    assert first.kind == "fails" and {"zero3", "pp2-dp4", "dp8"} <= set(first.trials)
    assert first.what == "the trial is predicted to run out of GPU memory"
    found = planned(P4D)
    zero3 = costs(found.job, found.topology).estimate(Candidate("deepspeed", Layout(dp=8), 1, Sharding(3)))
    used = zero3.memory.total / 2**30
    assert f"zero3: predicted: {used:.1f} of 40 GiB of GPU memory ({used / 40:.0%}, too much to fit)" in first.evidence
    assert "the chance to fit is below 1%" in first.evidence and zero3.fit_chance < 0.01
    check_recommends(first, found)
    assert not any(finding.kind == "fails" for finding in others)


@pytest.mark.parametrize(("trials", "status"), [(TOO_LARGE, 1), ("{tp: 4}", 0)])
def test_the_exit_status_says_whether_a_trial_is_predicted_to_fail(tmp_path, trials, status):
    arguments = ["doctor", str(study(tmp_path, trials)), "--cluster", P4D]
    assert CliRunner().invoke(app, arguments).exit_code == status
    ended = CliRunner().invoke(app, [*arguments, "--json"])
    found = json.loads(ended.output)
    assert ended.exit_code == status and [one["kind"] for one in found].count("fails") == status


@pytest.mark.parametrize(
    ("hosts", "trial", "kind", "reason"),
    [
        ("gpu: Foo", "tp: 8", "note", "the peak of 'Foo' in bf16 is unknown"),
        ("instance: p4d.24xlarge}, {instance: p5.48xlarge", "tp: 8", "note", "use a cluster with one type of GPU"),
        ("instance: p3dn.24xlarge", "tp: 8", "fails", "Tesla V100-SXM2-32GB has no matrix products in bf16"),
        ("instance: p4d.24xlarge", "{tp: 8, precision: fp8}", "fails", "precision=fp8 needs Hopper GPUs or newer"),
    ],
)
def test_gpus_that_the_plan_refuses_are_reported(
    tmp_path: Path, hosts: str, trial: str, kind: str, reason: str
) -> None:
    (tmp_path / "cluster.yaml").write_text(f"hosts: [{{{hosts}}}]")
    source, where = study(tmp_path, trial if "{" in trial else f"{{{trial}}}"), str(tmp_path / "cluster.yaml")
    found = [finding for finding in findings_at(source, cluster=where) if "not predicted: " in finding.evidence]
    assert [finding.kind for finding in found] == [kind] and reason in found[0].evidence
    precision = "fp8" if "fp8" in trial else "bf16"
    arguments = ["plan", "--model", "llama3-8b", "--cluster", where, "--precision", precision]
    planned = CliRunner().invoke(app, arguments)
    assert planned.exit_code and str(planned.exception) in found[0].evidence
    assert CliRunner().invoke(app, ["doctor", str(source), "--cluster", where]).exit_code == (kind == "fails")


def test_a_trial_that_may_fit_is_a_note(tmp_path):
    """The plan does not count a chance below 95% as fitting, but the trial does not fail for certain."""
    base = "model: llama3-8b, global_batch: 64, seq_length: 4096, num_layers: 12"
    found = findings_at(
        study(tmp_path, "{engine: deepspeed, zero_stage: 1, micro_batch: [1, 2, 4, 8]}", base), cluster=P4D
    )
    kinds = {finding.kind: finding for finding in of_memory(found)}
    chances = {
        kind: [int(chance) / 100 for chance in re.findall(r"chance to fit is (\d+)%", finding.evidence)]
        for kind, finding in kinds.items()
    }
    assert all(chance < 0.5 for chance in chances["fails"])
    assert "too much to fit" in kinds["fails"].evidence and "that fit with a chance" not in kinds["fails"].evidence
    if "note" in kinds:
        assert chances["note"] and all(0.5 <= chance < LIKELY for chance in chances["note"])


def test_numbers_of_a_layout_that_may_fit_say_which_memory_is_likely_to_fit() -> None:
    found = planned(P4D)
    misfit = found.misfits[0]
    trial = PredictedTrial(None, found.job, misfit, 40.0, None)
    above = f", above the {found.usable_bytes / 2**30:.1f} GiB that fit with a chance of 95%)"
    assert above in trial.numbers(replace(misfit, fit_chance=0.5)) and "too much" not in above
    assert ", too much to fit)" in trial.numbers(replace(misfit, fit_chance=0.49))
    assert "fit" not in trial.numbers(found.ranked[0])


def test_without_any_layout_the_finding_says_how_to_need_less(tmp_path):
    found = findings_at(
        study(tmp_path, "{engine: ddp, micro_batch: 2}", "model: llama3-405b"), cluster="p4d.24xlarge:1"
    )
    (finding,) = of_memory(found)
    assert "micro_batch below 2" in finding.change and "no other layout is predicted to fit" in finding.change


def test_auto_stands_for_values_that_fit(tmp_path):
    """A micro-batch of 16 does not fit, but micro_batch: auto finds one that does."""
    assert of_memory(findings_at(study(tmp_path, "{tp: 4, micro_batch: 16}"), cluster=P4D))
    assert not of_memory(findings_at(study(tmp_path, "{tp: 4, micro_batch: auto}"), cluster=P4D))
    base = f"{BASE}, num_layers: 28"
    assert of_memory(findings_at(study(tmp_path, "{tp: 2, micro_batch: auto}", base), cluster=P4D))
    auto = "{tp: 2, micro_batch: auto, recompute: auto}"
    assert not of_memory(findings_at(study(tmp_path, auto, base), cluster=P4D))


def test_a_layout_that_beats_every_trial(tmp_path):
    trials = "{name: zero3, engine: deepspeed, zero_stage: 3}, {tp: 8, pp: 2}"
    (finding,) = of_plans(findings_at(study(tmp_path, trials), cluster=P5))
    assert finding.kind == "slow" and set(finding.trials) == {"zero3", "tp8-pp2"}
    best = planned(P5).ranked[0]
    gains = re.findall(r"([\d.]+) × as fast as (\S+) \(([\d.]+) s per step\)", finding.evidence)
    assert [name for _, name, _ in gains] == list(finding.trials) and len(gains) == 2
    for gain, _, seconds in gains:
        assert float(gain) == pytest.approx(float(seconds) / best.step_seconds, rel=0.01)
    check_recommends(finding, planned(P5))


def test_nothing_beats_a_study_that_has_the_layout(tmp_path):
    best = json.dumps(settings_of(planned(P5).ranked[0].candidate))
    trials = f"{{name: zero3, engine: deepspeed, zero_stage: 3}}, {best}"
    assert not of_plans(findings_at(study(tmp_path, trials), cluster=P5))


def test_trials_of_other_work_are_compared_with_plans_of_their_own(tmp_path):
    """The best layout for bf16 gradients says nothing about trials with fp32 gradients."""
    best = json.dumps(settings_of(planned(P5).ranked[0].candidate))
    trials = f"{best}, {{name: other, engine: deepspeed, zero_stage: 3, grad_dtype: bf16}}"
    (finding,) = of_plans(findings_at(study(tmp_path, trials), cluster=P5))
    assert finding.trials == ("other",)
    check_recommends(finding, planned(P5, bytes_of_gradient=2))
    assert recommended(finding).grad_dtype == "bf16"


def test_a_trial_on_fewer_gpus_is_compared_with_a_plan_for_as_many(tmp_path):
    trials = "{name: zero3, engine: deepspeed, zero_stage: 3, world_size: 8, recompute: full}"
    (finding,) = of_plans(findings_at(study(tmp_path, trials), cluster=P5))
    assert "world_size: 8" in finding.change
    check_recommends(finding, planned("p5.48xlarge:1"))


def test_settings_of_the_base_do_not_change_the_recommended_layout(tmp_path):
    """The base recomputes, keeps gathered inputs and has a ZeRO stage, which the trial of the plan must undo."""
    base = f"{BASE}, recompute: full, engine: deepspeed, zero_stage: 3, reshard_after_forward: false"
    (finding,) = of_plans(findings_at(study(tmp_path, "{micro_batch: 1}", base), cluster=P5))
    check_recommends(finding, planned(P5), base)


def test_runs_that_plans_do_not_describe_are_not_predicted(tmp_path):
    """Reference kernels need more memory and time than a plan says, and compressed gradients fewer bytes."""
    trials = "{engine: ddp, kernels: reference}, {engine: ddp, powersgd_rank: 4}"
    found = findings_at(study(tmp_path, trials), cluster=P4D)
    assert not of_memory(found) and not of_plans(found)


def test_the_measured_network_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a slow network, as with plan --fabric, ZeRO-3 is farther behind."""
    trials = "{name: zero3, engine: deepspeed, zero_stage: 3}"
    path, log = study(tmp_path, trials), written(tmp_path / "slow.log", 20e9)
    seconds: list[float] = []
    original = PredictedTrial.numbers
    monkeypatch.setattr(
        PredictedTrial,
        "numbers",
        lambda self, one: seconds.append(self.estimate.step_seconds) or original(self, one),  # type: ignore[func-returns-value]
    )
    for fabric in (None, log):
        assert of_plans(findings_at(path, cluster=P5, fabric=fabric))
    assert seconds[-1] > 1.2 * seconds[0]
