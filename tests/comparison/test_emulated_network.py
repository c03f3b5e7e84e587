"""Studies whose emulated hosts share a limited network: equal losses, killed processes, refusals."""

import os
import signal
import time
from pathlib import Path

import pytest

from megabench.record import read_records
from tests.comparison.compare_process import (
    FAKE,
    REAL,
    compare,
    finish,
    running,
    start,
    torchrun,
    wait_until_gone,
    wait_until_running,
)
from tests.runtime.emulated import namespace_of, namespaces, needs_namespaces, network_state

STUDY = """
base: {model: llama-tiny, num_layers: 1, seq_length: 32, steps: 4, warmup_steps: 1, device: cpu, world_size: 2}
emulate_hosts: 2
trials:
"""


def written(folder: Path, trials: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(STUDY + trials)
    return path


@needs_namespaces
@pytest.mark.distributed
def test_a_run_over_a_limited_network_has_equal_losses(tmp_path: Path) -> None:
    study = written(
        tmp_path,
        "  - {name: free, engine: ddp}\n  - {name: limited, engine: ddp, emulate_network: {gb_per_s: 0.5}}\n",
    )
    before = network_state()
    status, out, err = compare(study, "--out", tmp_path / "out", command=REAL)
    assert status == 0, out + err
    assert network_state() == before
    free, limited = read_records(tmp_path / "out" / "results.jsonl")
    assert limited.losses == free.losses and limited.grad_norms == free.grad_norms
    network = limited.emulated_network
    assert free.emulated_network is None
    for link in (*network.before, *network.after):
        assert (link.forth_gb_per_s, link.back_gb_per_s) == pytest.approx((0.5, 0.5), rel=0.1)
    assert limited.link_bandwidth.send_recv_gb_per_s == pytest.approx(0.5, rel=0.15), "as the ranks measured it"
    assert network.sentence in out and "2 emulated at 0.5 GB/s" in out


@needs_namespaces
@pytest.mark.distributed
def test_a_killed_worker_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    study = written(tmp_path, "  - {emulate_network: {gb_per_s: 1}, env: {FAULT: kill, FAULT_RANK: 1}}\n")
    before, around = network_state(), namespaces()
    status, out, err = compare(study, "--out", tmp_path / "out")
    assert status == 1, out + err
    (record,) = read_records(tmp_path / "out" / "results.jsonl")
    assert (record.status, record.failure.kind) == ("failed", "killed")
    assert record.emulated_network.before and record.emulated_network.after, "measured around a failed run, too"
    assert network_state() == before and namespaces() <= around


@needs_namespaces
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_supervisor_leaves_the_network_as_it_was(tmp_path: Path, number: signal.Signals) -> None:
    study, out = written(tmp_path, "  - {emulate_network: {gb_per_s: 1}, env: {SLEEP: 600}}\n"), tmp_path / "out"
    before, ours = network_state(), namespace_of(os.getpid())
    supervisor = start(FAKE, study, "--out", out)
    try:
        wait_until_running(out, {f"logs/{name}/pid-{rank}" for name in names(out) for rank in range(2)})
        hosts = {namespace_of(pid) for pid in running(out).values()}
        assert len(hosts) == 2 and ours not in hosts, "each host has a namespace of its own"
        assert network_state() == before
        supervisor.send_signal(number)
    finally:
        finish(supervisor, 30)
    wait_until_gone(out, 30)
    assert not namespaces() & hosts and network_state() == before


def names(out: Path, seconds: float = 60.0) -> list[str]:
    """Wait for the logs of the first trial, and return the names of the trials with logs."""
    deadline = time.monotonic() + seconds
    while not (found := [path.name for path in out.glob("logs/*")]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.mark.distributed
def test_other_launches_are_refused_in_one_sentence(tmp_path: Path) -> None:
    study = written(tmp_path, "  - {emulate_network: {gb_per_s: 1}}\n")
    status, out, err = compare(study, "--out", tmp_path / "out", command=torchrun(1, 2))
    assert "emulate_network needs one process that starts all ranks; start megabench compare on one machine" in err
    assert not (tmp_path / "out" / "results.jsonl").exists()
    flags = ["--emulate-hosts", "2", "--emulate-network", "{gb_per_s: 1}", "--device", "cpu", "--nproc", "2"]
    status, out, err = compare(*flags, command=[*REAL[:3], "train"])
    assert (status, out) == (2, "")
    assert err == (
        "Error: emulate_network works only in the trials of megabench compare on one machine. Write a study with this "
        "run as its only trial, or omit emulate_network.\n"
    )


def test_shared_memory_is_refused_on_cpu(tmp_path: Path) -> None:
    study = written(tmp_path, "  - {emulate_network: {gb_per_s: 25, transport: shared_memory}}\n")
    status, out, err = compare(study, "--out", tmp_path / "out", command=REAL)
    assert (status, out) == (2, "")
    assert "transport=shared_memory is a plugin of NCCL, which connects only GPUs; on CPU, use transport=sockets" in err
    assert not (tmp_path / "out").exists()
