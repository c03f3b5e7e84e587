"""The net plugin over shared memory: every byte, the time by the model, killed processes, and its compiler."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megabench.runtime import net_plugin
from megabench.runtime.net_plugin import NetPlugin, NetPluginError

pytestmark = pytest.mark.distributed
FAST = 1000.0


def start(folder: Path, size: int, task: str, hosts=None, gb_per_s=FAST, latency_us=0.0, **options):
    """Start `size` processes of net_plugin_worker.py. By default, each is a host of its own."""
    rendezvous = folder / f"{task}-{time.monotonic_ns()}"
    rendezvous.mkdir()
    library = str(net_plugin.build())
    processes = []
    for rank in range(size):
        variables = net_plugin.variables(hosts[rank] if hosts else rank, gb_per_s, latency_us, rendezvous / "schedule")
        given = {"task": task, "library": library, "rendezvous": str(rendezvous), "rank": rank, "size": size, **options}
        if task == "endless":
            given["folder"] = str(rendezvous)
        command = [sys.executable, "-m", "tests.runtime.net_plugin_worker", json.dumps(given)]
        env, pipe = {**os.environ, **variables}, subprocess.PIPE
        processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env))
    return processes, rendezvous


def finish(processes) -> list[str]:
    """Return the outputs of processes that must end with exit status 0."""
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), [error for _, error in outputs]
    return [output for output, _ in outputs]


@pytest.mark.parametrize(
    ("size", "count", "largest", "gb_per_s", "latency_us"),
    # 64 MiB per rank takes seconds on two cores, so only two ranks send it
    [(2, 400, 2**26, FAST, 0), (3, 300, 2**20, FAST, 0), (4, 200, 2**20, 2.0, 40), (2, 300, 2**17, 0.5, 10)],
)
def test_all_reduces_of_drawn_sizes_have_every_byte(tmp_path, size, count, largest, gb_per_s, latency_us) -> None:
    options = {"gb_per_s": gb_per_s, "latency_us": latency_us}
    processes, _ = start(tmp_path, size, "all_reduces", count=count, seed=size, largest=largest, **options)
    finish(processes)


def test_a_corrupted_byte_is_found(tmp_path) -> None:
    processes, _ = start(tmp_path, 2, "all_reduces", count=60, seed=1, largest=4096, corrupts_at=50)
    _, error = processes[0].communicate(timeout=60)
    processes[1].communicate(timeout=60)
    assert processes[0].returncode == 1 and "all-reduce 50 of " in error and ": 1 wrong bytes" in error


@pytest.mark.parametrize(("gb_per_s", "latency_us"), [(FAST, 0), (2.0, 20)])
def test_messages_are_matched_by_tag_and_order(tmp_path, gb_per_s, latency_us) -> None:
    processes, _ = start(tmp_path, 2, "messages", count=3000, seed=3, gb_per_s=gb_per_s, latency_us=latency_us)
    finish(processes)


@pytest.mark.parametrize(
    ("gb_per_s", "latency_us", "size"),
    [
        (0.5, 0, 2**20),
        (0.5, 1000, 2**16),
        (1.0, 0, 2**22),
        (1.0, 40, 2**19),
        (2.0, 10, 2**21),
        (2.0, 200, 2**18),
        (4.0, 10, 2**22),
        (4.0, 1000, 1),
        (4.0, 200, 0),
    ],
)
def test_a_message_takes_its_size_over_the_rate_plus_the_latency(tmp_path, gb_per_s, latency_us, size) -> None:
    model = size / (gb_per_s * 1e9) + latency_us * 1e-6
    shortest = 1.0
    for _ in range(10):  # other processes on the same CPUs can only make a message slower
        processes, _ = start(tmp_path, 2, "times", gb_per_s=gb_per_s, latency_us=latency_us, size_bytes=size, count=60)
        starts, ends = (json.loads(output) for output in finish(processes))
        shortest = min(shortest, *(end - start for start, end in zip(starts, ends, strict=True)))
        if shortest < 1.1 * model:
            break
    assert model <= shortest < 1.1 * model


@pytest.mark.parametrize(
    ("size", "hosts", "share"),
    # in a ring, each process sends and receives; both processes of a host share its rate in each direction
    [(2, [0, 1], 1.0), (4, [0, 1, 0, 1], 0.5), (3, [0, 1, 2], 1.0)],
)
@pytest.mark.parametrize("gb_per_s", [0.25, 1.0])
def test_the_processes_of_a_host_share_its_rate(tmp_path, size, hosts, share, gb_per_s) -> None:
    message, count = 2**19, round(gb_per_s * 200)
    fastest = 0.0
    for _ in range(10):
        processes, _ = start(tmp_path, size, "stream", hosts, gb_per_s, 10, size_bytes=message, count=count)
        starts, ends = zip(*(json.loads(output) for output in finish(processes)), strict=True)
        fastest = max(fastest, count * message / (max(ends) - min(starts)) / 1e9)
        if fastest > 0.9 * share * gb_per_s:
            break
    assert 0.9 * share * gb_per_s < fastest <= share * gb_per_s


def test_requests_and_sizes_have_limits(tmp_path) -> None:
    processes, _ = start(tmp_path, 1, "limits", gb_per_s=25.0, latency_us=40)
    assert finish(processes) == ["the network plugin returned 5 from send\n"]


@pytest.mark.parametrize(("killed", "forks"), [(0, False), (1, False), (1, True)])
def test_the_peer_of_a_killed_process_gets_an_error_and_nothing_remains(tmp_path, killed, forks) -> None:
    before = set(os.listdir("/dev/shm"))
    processes, rendezvous = start(tmp_path, 2, "endless", gb_per_s=1.0, forks=forks)
    deadline = time.monotonic() + 60
    while len(list(rendezvous.glob("running-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)  # in the middle of 64 MiB
    processes[killed].send_signal(signal.SIGKILL)
    killed_at = time.time()
    processes[killed].wait()
    output, error = processes[1 - killed].communicate(timeout=60)
    processes[killed].communicate()
    problem, noticed_at = json.loads(output or "[]") or pytest.fail(error)
    assert problem.startswith("the network plugin returned 6 from ") and noticed_at - killed_at < 5
    assert set(os.listdir("/dev/shm")) <= before
    sockets = Path("/proc/net/unix").read_text()
    assert forks or not [process.pid for process in processes if f"@megabench-{process.pid}-" in sockets]


@pytest.mark.parametrize("name", ["GB_PER_S", "LATENCY_US", "HOST", "SCHEDULE"])
@pytest.mark.parametrize("value", [None, "", "fast", "-1"])
def test_missing_and_wrong_variables_are_refused(tmp_path, monkeypatch, name, value) -> None:
    variables = net_plugin.variables(0, 1.0, 0, tmp_path / "schedule") | {f"MEGABENCH_EMULATED_{name}": value}
    if name == "SCHEDULE" and value:
        variables[f"MEGABENCH_EMULATED_{name}"] = str(tmp_path / "missing" / value)
    for variable, given in variables.items():
        monkeypatch.setenv(variable, given) if given is not None else monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConnectionError, match=r"returned [25] from init"):
        NetPlugin(net_plugin.build())


def test_the_plugin_is_compiled_once_and_without_a_compiler_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = net_plugin.build()
    made = library.stat().st_mtime_ns
    assert net_plugin.build() == library and library.stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "megabench").iterdir()] == [library.name]
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(NetPluginError, match=r"/bin/false cannot compile net_plugin.c \(exit status 1\)"):
        net_plugin.build()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NetPluginError, match=r"needs a C compiler, and no-such-compiler was not found. Install gcc or"):
        net_plugin.build()
    monkeypatch.delenv("CC")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NetPluginError, match="cannot write the network plugin to"):
        net_plugin.build()
