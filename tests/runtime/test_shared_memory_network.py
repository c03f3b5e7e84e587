"""The network over shared memory: its speed, the processes of its hosts, and what is refused."""

import os
import sys
from pathlib import Path

import pytest

from megabench.runtime.emulated_network import EmulatedNetworkError
from megabench.runtime.shared_memory_network import SharedMemoryNetwork
from megabench.study import compare_request
from megabench.study.compare_request import Request
from megabench.study.study import StudyError
from megabench.supervisor.coordinator import Coordinator
from megabench.supervisor.launch import open_here
from megabench.supervisor.trial_process import Task
from megabench.supervisor.trial_queue import TrialQueue
from megabench.train.rank_setup import split_nccl
from tools.emulated_network import check_under_nccl

# what the trainer is in the test of the supervisor: two ranks that exchange a megabyte over the plugin of their host
EXCHANGE = """
import os
import numpy as np
from tests.runtime.net_plugin_worker import Ring
rank = int(os.environ["RANK"])
ring = Ring(os.environ["NCCL_NET_PLUGIN"], os.environ["FOLDER"], rank, 2)
received = np.zeros(2**20, np.uint8)
ring.exchange(np.full(2**20, rank, np.uint8), received)
assert (received == 1 - rank).all()
print("host", os.environ["MEGABENCH_EMULATED_HOST"], "of", os.environ["NCCL_NET"])
"""


@pytest.mark.distributed
@pytest.mark.parametrize(("num_hosts", "gb_per_s", "latency_us"), [(2, 0.2, 0), (2, 1.0, 100), (3, 0.5, 1000)])
def test_every_host_sends_and_receives_at_the_set_bandwidth(num_hosts, gb_per_s, latency_us) -> None:
    best, trips = [0.0] * (2 * (num_hosts - 1)), []
    with SharedMemoryNetwork(num_hosts, gb_per_s, latency_us) as network:
        for _ in range(10):  # other processes on the same CPUs can only make the network slower
            links = network.measure()
            assert [link.hosts for link in links] == [(0, host) for host in range(1, num_hosts)]
            rates = [rate for link in links for rate in (link.forth_gb_per_s, link.back_gb_per_s)]
            best = [max(pair) for pair in zip(best, rates, strict=True)]
            trips += [link.round_trip_us for link in links]
            if min(best) >= 0.9 * gb_per_s and min(trips) < 2.5 * latency_us + 100:
                break
    assert best == pytest.approx([gb_per_s] * len(best), rel=0.1)
    assert 2 * latency_us <= min(trips) < 2.5 * latency_us + 100


@pytest.mark.distributed
def test_the_supervisor_gives_each_rank_the_plugin_of_its_host(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    env = {"FOLDER": str(tmp_path)}
    task = Task([], 2, "cuda", env, logs, 60.0, 2, gb_per_s=1.0, latency_us=20, transport="shared_memory")
    queue = TrialQueue(Coordinator(open_here(2), []), [sys.executable, "-c", EXCHANGE])
    result = queue.run(task, lambda progress: None)
    assert [(logs / f"rank-{rank}.log").read_text() for rank in (0, 1)] == [
        "host 0 of Emulated\n",
        "host 1 of Emulated\n",
    ]
    assert "rank 0 ended with exit status 0 but wrote no record.json" in result.verdict.error
    network = result.network
    assert (network.transport, network.gb_per_s, network.latency_us) == ("shared_memory", 1.0, 20)
    assert len(network.before) == len(network.after) == 1
    assert not [file for file in Path("/proc/self/fd").iterdir() if "memfd:schedule" in os.path.realpath(file)]


@pytest.mark.parametrize(
    ("variables", "expected"), [({}, "Socket"), ({"MEGABENCH_EMULATED_SCHEDULE": "x"}, "Emulated")]
)
def test_nccl_uses_the_network_of_the_supervisor(monkeypatch, variables, expected) -> None:
    monkeypatch.setattr(os, "environ", dict(variables))
    split_nccl(3)
    assert (os.environ["NCCL_NET"], os.environ["NCCL_HOSTID"]) == (expected, "emulated-3")


def test_a_study_without_a_compiler_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(compare_request, "gpu_names", lambda: ["NVIDIA H100"] * 2)
    path = tmp_path / "study.yaml"
    path.write_text(
        "base: {model: llama-tiny, steps: 4, warmup_steps: 1}\nemulate_hosts: 2\n"
        "trials: [{emulate_network: {gb_per_s: 25, latency_us: 40, transport: shared_memory}}]\n"
    )
    with pytest.raises(StudyError, match=r"emulate_network: .* needs a C compiler, and no-such-compiler was not found"):
        Request(path, tmp_path).plan_here(2)
    monkeypatch.delenv("CC")
    study, _ = Request(path, tmp_path).plan_here(2)
    (trial,) = study.trials
    limit = trial.resolved.emulate_network
    assert str(limit) == "{gb_per_s: 25, latency_us: 40, transport: shared_memory}"
    assert limit.short == "25-40us-shared_memory" and limit.model_validate(str(limit)) == limit


@pytest.mark.distributed
def test_the_check_under_nccl_compares_times_and_results(capfd) -> None:
    """Test the program over gloo, which does not use the plugin. Takes 20 s, because processes import torch."""
    check_under_nccl.main(["--gb-per-s", "25", "--latency-us", "40"], backend="gloo")
    _, *lines = capfd.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["1,024", "1,048,576", "67,108,864"]
    assert all(line.endswith(" 0 of 200") for line in lines)
    assert check_under_nccl.model_seconds(10**9, 25.0, 40) == pytest.approx(0.04 + 80e-6)


def test_the_check_needs_two_gpus(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        check_under_nccl.main([])
    assert "two GPUs are needed, and fewer were found" in capsys.readouterr().err


def test_the_plugin_must_be_built(monkeypatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(EmulatedNetworkError, match="emulate_network: the shared-memory network needs a C compiler"):
        SharedMemoryNetwork(2, 25.0).__enter__()
