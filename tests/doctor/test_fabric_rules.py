"""A measured network below its expected bandwidth is a finding, before a study runs and for finished runs."""

from pathlib import Path

import pytest

from megabench.cost.fabric import Collective
from megabench.doctor import Finding
from megabench.doctor.write_findings import findings_at
from megabench.errors import UserError
from megabench.record import LayoutSizes, Machine, write_records
from tests.planner.nccl_output import output
from tests.study.records import make_record, work_class

TWO = "p5.48xlarge:2"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return written(tmp_path / "slow.log", 20e9)


def written(path: Path, bytes_per_second: float) -> Path:
    gathers = [Collective("all_gather", 2, 8, size, size / bytes_per_second) for size in (2.0**24, 2.0**28)]
    path.write_text(output(gathers, "all_gather_perf", redop="none"))
    return path


def study(folder: Path) -> Path:
    path = folder / "study.yaml"
    path.write_text(
        "base: {model: llama3-8b, global_batch: 64, steps: 20, warmup_steps: 5}\n"
        "trials: [{name: zero3, engine: deepspeed, zero_stage: 3}, {name: one-host, tp: 8, world_size: 8}]\n"
    )
    return path


def results(folder: Path, instance_type: str | None) -> Path:
    """The directory of a run of ZeRO-3 on two hosts."""
    record = make_record(
        [6.0, 5.5],
        trial="zero3",
        engine="deepspeed",
        options={"zero_stage": 3, "recompute": "none"},
        model="llama3-8b",
        work_class=work_class(model="llama3-8b", num_layers=32, precision="bf16", global_batch=64, seq_length=4096),
        precision="bf16",
        seq_length=4096,
        global_batch=64,
        micro_batch=1,
        layout=LayoutSizes(tp=1, cp=1, pp=1, vp=1, dp=16),
        world_size=16,
        num_hosts=2,
        device="NVIDIA H100 80GB HBM3",
        machines=[Machine(host=name, instance_type=instance_type) for name in ("a", "b")],
    )
    write_records(folder / "results.jsonl", [record])
    return folder


def of_network(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.what.startswith("the network between hosts is slower")]


def check(found: list[Finding], path: Path) -> None:
    (finding,) = of_network(found)
    assert (finding.kind, finding.trials) == ("slow", ("zero3",))
    assert finding.what == "the network between hosts is slower than expected for EFA of p5.48xlarge"
    assert finding.evidence.startswith(f"{path}: all-gather over 2 hosts reaches 19 GB/s of ")
    slowdown = finding.evidence.split("predicted: a step of zero3 takes ")[1].removesuffix(" × as long")
    assert float(slowdown) > 1.05
    assert "fi_info -p efa" in finding.change and "docs/troubleshooting.md" in finding.change


def test_a_study_before_it_runs(tmp_path: Path, slow: Path):
    """The trial on one host does not use the network."""
    check(findings_at(study(tmp_path), cluster=TWO, fabric=slow), slow)
    assert not of_network(findings_at(study(tmp_path), cluster=TWO))
    fast = written(tmp_path / "fast.log", 300e9)
    assert not of_network(findings_at(study(tmp_path), cluster=TWO, fabric=fast))


def test_finished_runs_name_their_hosts(tmp_path: Path, slow: Path):
    check(findings_at(results(tmp_path, "p5.48xlarge"), fabric=slow), slow)
    check(findings_at(results(tmp_path, None), cluster=TWO, fabric=slow), slow)
    with pytest.raises(UserError, match=r"the records name no known instance type. Use --cluster"):
        findings_at(results(tmp_path, None), fabric=slow)
    with pytest.raises(UserError, match=r"--(nproc|cluster) works only with a study file"):
        findings_at(results(tmp_path, None), cluster=TWO)


def test_a_study_on_one_host_is_refused(tmp_path: Path, slow: Path):
    with pytest.raises(UserError, match="the cluster has one host"):
        findings_at(study(tmp_path), cluster="p5.48xlarge:1", fabric=slow)
