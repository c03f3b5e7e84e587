"""`megabench calibrate` on CPU over gloo: its profile is one that `megabench plan` reads."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from megabench.calibrate.attention import NUM_ATTENTION_MEASUREMENTS, attention, fit_attention
from megabench.calibrate.collectives import _shapes
from megabench.calibrate.fp8_products import fp8_cost, num_fp8_measurements
from megabench.calibrate.links import _link_cost, num_link_measurements
from megabench.calibrate.operations import num_device_measurements
from megabench.calibrate.timers import Bench
from megabench.config.clusters import read_cluster
from megabench.cost import compute, network
from megabench.cost.compute import GpuModel, flash_work
from megabench.cost.fabric_files import collectives_of, read_fabric
from megabench.cost.job import Product
from megabench.cost.profile import ATTENTION, Fp8Cost, LinkCost, Measurement, profile_for, read_profile
from megabench.hardware.topology import Host, build, split
from megabench.models.find import find_model
from tests.comparison.compare_process import REPOSITORY


def megabench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megabench", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.e2e
def test_a_machine_becomes_a_profile(tmp_path: Path):
    path = tmp_path / "here.json"
    ended = megabench("calibrate", "--out", str(path), "--model", "llama-tiny", "--nproc", "2")
    assert ended.returncode == 0, ended.stderr
    profile = read_profile(path)
    assert profile.kind == "measured" and profile.devices == ["cpu"]
    kinds = {one.kind for one in profile.measurements}
    assert {
        "product",
        "attention forward",
        "element-wise",
        "kernel launches",
        "all-gather",
        "send",
        "host copy",
    } <= kinds
    assert all(one.seconds > 0 for one in profile.measurements)
    assert profile.origin["memory_gb_per_s"] == "megabench calibrate" and "shm" in profile.origin["links"]
    assert "not measured here" in profile.origin["*"] and "fp8" not in profile.origin
    assert profile.fp8 == profile_for("cpu").fp8
    planned = megabench("plan", "--cluster", "p5.48xlarge:1", "--profile", str(path))
    assert planned.returncode == 0 and "generic-here" in planned.stdout


@pytest.mark.e2e
def test_a_profile_that_cannot_be_written_is_not_measured(tmp_path: Path):
    (tmp_path / "file").touch()
    for path, said in ((tmp_path, f"{tmp_path} is a directory"), (tmp_path / "file" / "x.json", "cannot be written")):
        ended = megabench("calibrate", "--out", str(path), "--nproc", "2")
        assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.e2e
def test_hosts_of_one_rank_say_nothing_of_what_compute_pays_inside_them(tmp_path: Path):
    path = tmp_path / "here.json"
    ended = megabench("calibrate", "--out", str(path), "--model", "llama-tiny", "--nproc", "2", "--emulate-hosts", "2")
    assert ended.returncode == 0, ended.stderr
    origin = read_profile(path).origin
    assert "interference" not in origin and "socket" in origin["links"]


class FakeBench(Bench):
    """Runs each operation once on CPU, and takes the seconds that the cost model predicts."""

    def __init__(self, machine: GpuModel) -> None:
        super().__init__(torch.device("cpu"))
        self.machine = machine

    def seconds_in_turn(
        self, operations: Mapping[str, Callable[[], object]], before: Callable[[], object], **sizes: float
    ) -> None:
        profile, work = self.machine.profile, flash_work(1, self.machine.profile.attention_half_length, **sizes)
        shares = (profile.attention_forward, profile.attention_backward / 2.5)
        for (kind, operation), share in zip(operations.items(), shares, strict=True):
            before()
            operation()
            self.measurements.append(Measurement(kind=kind, sizes=sizes, seconds=work / self.machine.peak / share))

    def seconds(self, kind: str, operation: Callable[[], object], **sizes: float) -> float:
        operation()
        if kind == "fp8 cast":
            seconds = compute.cast_seconds(self.machine, sizes["bytes"])
        else:
            product = cast(Product, kind.removeprefix("fp8 ").replace(" ", "_"))
            seconds = compute.fp8_gemm_seconds(self.machine, product, sizes["m"], sizes["n"], sizes["k"])
        self.measurements.append(Measurement(kind=kind, sizes=sizes, seconds=seconds))
        return seconds


@pytest.mark.parametrize("model", ["llama-tiny", "qwen3-0.6b"])
def test_costs_of_fp8_are_fitted_to_measurements(model: str):
    known = Fp8Cost(forward=0.62, input_gradient=0.58, weight_gradient=0.6, half_k=300, cast_share=0.8)
    # memory does not limit even these small products
    profile = profile_for("NVIDIA H200").model_copy(update={"fp8": known, "memory_gb_per_s": 1e9})
    shape, peak = find_model(model), profile.peak("NVIDIA H200", "fp8")
    bench = FakeBench(GpuModel(profile, peak, peak))
    assert fp8_cost(bench, shape, 20, profile, peak).model_dump() == pytest.approx(known.model_dump())
    assert len(bench.measurements) == num_fp8_measurements(shape, "NVIDIA H200")


def test_constants_of_attention_are_fitted_to_measurements():
    known = {"attention_forward": 0.68, "attention_backward": 0.53, "attention_half_length": 60.0}
    profile = profile_for("cpu").model_copy(update={"num_sms": 1} | known)
    bench = FakeBench(GpuModel(profile, peak=1e12))
    timed = attention(bench, find_model("llama-tiny"), 64)
    assert len(timed) == NUM_ATTENTION_MEASUREMENTS and {one.sizes["length"] for one in timed} == {16, 32, 64}
    other = profile.model_copy(update=dict.fromkeys(ATTENTION, 0.5))
    found = fit_attention(other, 1e12, timed)
    assert {name: getattr(found, name) for name in ATTENTION} == pytest.approx(known)
    # attention that takes no time, as if the host hid it, is predicted at the peak
    at_once = [one.model_copy(update={"seconds": 1e-12}) for one in timed]
    found = fit_attention(other, 1e12, at_once)
    assert found.attention_forward == found.attention_backward == 1 and found.attention_half_length == 0


def test_fp8_is_measured_only_where_it_works():
    llama = find_model("llama3-8b")
    assert num_fp8_measurements(llama, "NVIDIA H100 80GB HBM3") == 3 * 4 * 2 + 1
    assert not num_fp8_measurements(llama, "NVIDIA A100-SXM4-80GB") and not num_fp8_measurements(llama, "cpu")
    assert not num_fp8_measurements(replace(llama, hidden_size=4104), "NVIDIA H100 80GB HBM3")


@pytest.mark.e2e
def test_the_network_between_emulated_hosts_is_measured(tmp_path: Path):
    path = tmp_path / "here.json"
    ended = megabench("calibrate", "--out", str(path), "--model", "llama-tiny", "--nproc", "4", "--emulate-hosts", "2")
    assert ended.returncode == 0, ended.stderr
    profile = read_profile(path)
    topology = split(build([(Host("host", "cpu", "shm", "socket"), 4, 4)]), 2)
    shape = find_model("llama-tiny")
    assert len(profile.measurements) == num_device_measurements(
        shape
    ) + NUM_ATTENTION_MEASUREMENTS + num_link_measurements(topology, "cpu")
    found = read_fabric(path).collectives
    assert found == collectives_of(profile.measurements) and all(one.seconds > 0 for one in found)
    groups = {(one.num_hosts, one.ranks_per_host, one.groups_per_host) for one in found if one.kind != "send"}
    assert groups == {(2, 2, 1), (2, 1, 2)}
    assert {one.kind for one in found} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    links, shipped = profile.links, profile_for("cpu").links
    assert links["socket"] != shipped["socket"] and links["shm"] != shipped["shm"]
    assert links["efa"] == shipped["efa"] and "shm, socket" in profile.origin["links"]


def test_groups_of_several_lengths_are_measured():
    """Three hosts of two ranks: one ring of all, a ring of each local rank, and such rings over two hosts."""
    host = Host("host", "cpu", "shm", "socket")
    three = build([(replace(host, name=f"host-{number}"), 2, 2) for number in range(3)])
    assert [(one.groups, one.num_hosts, one.ranks_per_host) for one in _shapes(three)] == [
        ([[0, 1, 2, 3, 4, 5]], 3, 2),
        ([[0, 2, 4], [1, 3, 5]], 3, 1),
        ([[0, 2], [1, 3]], 2, 1),
    ]
    assert _shapes(build([(host, 4, 4)])) == []
    assert _shapes(read_cluster("p6e-gb200.36xlarge:2")) == [], "one NVLink domain"


@pytest.mark.parametrize(("ranks", "share"), [(4, 0.5), (2, 0.8)])
def test_pairs_are_told_from_larger_groups(ranks: int, share: float):
    """Two ranks that reach half of what four do; where there are only two, the share is as it was known before."""
    host = Host("host", "NVIDIA H200", "pcie", "socket", None, 450.0)
    topology = build([(host, ranks, ranks)])
    where = network.span(topology, [range(ranks)])
    # of 4 GB each rank receives half or three quarters, at 100 and 200 GB/s
    times = {2: [(8.0, 0.0), (4e9, 0.02)], 4: [(8.0, 0.0), (4e9, 0.015)]}
    before = LinkCost(efficiency=0.6, base_seconds=1e-5, hop_seconds=1e-6, pair_share=0.8)
    found = _link_cost(where, "nvlink", {size: times[size] for size in {2, ranks}}, before)
    assert found.pair_share == pytest.approx(share)
    assert found.efficiency == pytest.approx((200 if ranks == 4 else 125) / 450)


def test_profiles_of_earlier_releases_are_read_and_written_without_headroom() -> None:
    old = read_profile(REPOSITORY / "benchmarks/calibrate-h100/two-gpus.json")
    assert old.headroom == 0.05 and "headroom" not in old.model_dump()
    assert profile_for(old.devices[0]).headroom is None
