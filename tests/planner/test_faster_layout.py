"""The line that a run prints if the plan knows a much faster layout."""

import re
from dataclasses import replace

import pytest

from megabench.config import RunConfig
from megabench.config.record_fields import requested_fields
from megabench.cost.profile import profile_for
from megabench.planner import faster_layout as module
from megabench.planner.faster_layout import faster_layout
from megabench.record import RunRecord
from tests.planner.jobs import cluster
from tests.planner.test_own_layout import planned


def record(where: str = "p5.48xlarge:1", **settings) -> RunRecord:
    given = RunConfig.parse({"model": "llama3-8b", "seq_length": 8192, "global_batch": 32, "micro_batch": 1} | settings)
    topology = cluster(where)
    run = given.resolve(topology.world_size, "cuda")
    fields = requested_fields(run, given)
    return RunRecord(**fields, trial="", work_class=None, status="ok", num_hosts=1, device=topology.hosts[0].device)


def test_a_slow_layout_is_told_the_recommended_one():
    best = planned("p5.48xlarge:1").ranked[0]
    line = faster_layout(record(tp=8), cluster("p5.48xlarge:1"))
    assert line and f"that {best.candidate.name} trains " in line and " as fast as tp8 mb1 on these GPUs: --tp " in line
    gain = re.search(r"trains ([\d.]+) ×", line)
    assert gain and float(gain[1]) >= profile_for("NVIDIA H100 80GB HBM3").least_gain == 1.12


def test_a_layout_that_is_nearly_as_fast_is_told_nothing():
    assert faster_layout(record(tp=2), cluster("p5.48xlarge:1")) is None


def test_a_gain_within_the_prediction_error_is_told_to_nobody(monkeypatch):
    uncertain = profile_for("NVIDIA H100 80GB HBM3").model_copy(update={"relative_error": 5.0})
    assert uncertain.least_gain == 6.0 and uncertain.model_copy(update={"relative_error": 0.01}).least_gain == 1.1
    monkeypatch.setattr(module, "profile_for", lambda _: uncertain)
    assert faster_layout(record(tp=8), cluster("p5.48xlarge:1")) is None


@pytest.mark.parametrize("device", ["cpu", "some other GPU"])
def test_devices_without_a_profile_are_told_nothing(device):
    topology = cluster("p5.48xlarge:1")
    other = replace(topology, hosts=tuple(replace(host, device=device) for host in topology.hosts))
    assert faster_layout(record(tp=8), other) is None


def test_engines_without_a_cost_model_are_told_nothing():
    found = record(tp=8).model_copy(update={"engine": "torchtitan"})
    assert faster_layout(found, cluster("p5.48xlarge:1")) is None
