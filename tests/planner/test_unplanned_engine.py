"""An engine that the planner cannot predict: plans, the memory check and the doctor do without it and say so."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabench.cli.commands import app
from megabench.config import RunConfig
from megabench.cost.profile import shipped_profiles
from megabench.planner.engines.registry import PLANNED_ENGINES
from megabench.planner.predict import Predictor, candidate_of
from megabench.planner.search import candidates
from megabench.train.memory_check import check_memory
from tests.doctor.test_planner_rules import ZERO2, advice
from tests.planner.jobs import cluster, job
from tests.planner.test_compare_clusters import plans, shown
from tests.study.records import make_record

PLAN = ["plan", "--model", "llama3-8b", "--cluster", "p5.48xlarge:1", "--seq-length", "4096", "--top", "1"]


@pytest.fixture(autouse=True)
def _without_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PLANNED_ENGINES, "ddp")


def test_plans_do_not_contain_it_and_say_so() -> None:
    assert "ddp" not in {candidate.engine for candidate in candidates(job(), cluster())}
    text, found = (CliRunner().invoke(app, [*PLAN, *more]).output for more in ([], ["--json"]))
    assert "Without a cost model, and therefore not in a plan: DDP." in text
    assert json.loads(found)["not_covered"] == ["ddp"]


def test_a_comparison_of_clusters_says_so_once() -> None:
    text = shown(plans("p5.48xlarge:2", "g5.48xlarge:1:1", model="llama3-70b", global_batch=32))
    assert text.count("Without a cost model") == 1
    assert "g5.48xlarge:1:1: no layout of llama3-70b fits on this cluster" in text


def test_its_records_have_no_prediction() -> None:
    record = make_record([1.0], engine="ddp", world_size=16)
    assert candidate_of(record) is None
    assert Predictor(cluster(), shipped_profiles()["h100"], []).predict(record) is None


def test_the_memory_check_says_that_it_cannot_judge_it() -> None:
    given = RunConfig.parse({"model": "llama3-8b", "engine": "ddp", "device": "cpu"})
    said = check_memory(given.resolve(1, "cpu"), given, 0, 1)
    assert said == "The memory check cannot judge DDP, because the planner has no memory model of it."


def test_the_doctor_does_not_recommend_it(tmp_path: Path) -> None:
    assert not [finding for finding in advice(tmp_path, ZERO2) if "DDP" in finding.evidence]
    assert not advice(tmp_path, "{name: ddp, engine: ddp, micro_batch: 4, precision: fp32}")
