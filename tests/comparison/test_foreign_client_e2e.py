"""A foreign client of the store of a study with two supervisors: what it forges, replays and deletes."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import DistError, TCPStore

from megabench.record import read_records
from tests.comparison.compare_process import BASE, REPOSITORY, finish, start, torchrun

pytestmark = pytest.mark.e2e

STUDY = BASE + (
    "timeout_seconds: 15\n"
    "trials: [{name: a, world_size: 2}, {name: b, world_size: 2, seed: 1}, {name: c, world_size: 2, seed: 2}]\n"
)
COORDINATOR = "study/0/coordinator"


def store_of(agents: list[subprocess.Popen[str]]) -> TCPStore:
    """A client of the study's store, found like any other process of the machine would find it."""
    while all(agent.poll() is None for agent in agents):
        for agent in agents:
            for child in psutil.Process(agent.pid).children():
                with suppress(psutil.Error, KeyError):
                    port = int(child.environ()["MASTER_PORT"])
                    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        time.sleep(0.05)
    raise AssertionError("no supervisor has started")


@contextmanager
def foreign_client(agents: list[subprocess.Popen[str]], act: Callable[[TCPStore], None]) -> Iterator[None]:
    """Let a thread call `act` again and again while the study runs."""
    store, is_over = store_of(agents), threading.Event()

    def attack() -> None:
        with suppress(DistError):
            while not is_over.wait(0.02):
                act(store)

    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join(10.0)


def study_under(tmp_path: Path, act: Callable[[TCPStore], None]) -> tuple[list[int], str, Path]:
    """The exit statuses, the errors and the directory of a study on two agents beside a foreign client."""
    study, out = tmp_path / "study.yaml", tmp_path / "out"
    study.write_text(STUDY)
    command = torchrun(2, 1, study, "--out", out)
    agents = [start(command) for _ in range(2)]
    with foreign_client(agents, act):
        ends = [finish(agent) for agent in agents]
    return [status for status, _, _ in ends], "".join(out + err for _, out, err in ends), out


def absent(store: TCPStore, key: str) -> bool:
    return not store.check([key])


def test_forged_messages_are_ignored(tmp_path):
    """The client announces a task that would run its own code, stops trials and the study, and counts ranks."""
    owned = tmp_path / "owned"
    env = {"PYTHONSTARTUP": "x", "FAULT": "environment", "FAULT_RANK": "0"}
    task = {"flags": ["--out", str(owned), "--steps", "4"], "world_size": 2, "device": "cpu", "env": env}
    order = json.dumps({"task": task | {"logs": str(owned), "timeout_seconds": 9.0}})
    forged = {f"{COORDINATOR}/announced/task/{number}": order for number in range(4)}
    forged |= {f"{COORDINATOR}/stopped": json.dumps({"reason": "a stranger says so", "rank": 1})}
    forged |= {f"study/0/task/{number}/supervisors/stop": "failed" for number in range(1, 4)}
    forged |= {f"study/0/task/{number}/failure/0": '{"rank": 0}' for number in range(1, 4)}

    def act(store: TCPStore) -> None:
        for key, value in forged.items():
            if absent(store, key):
                store.set(key, value)
        for number in range(1, 4):
            store.add(f"study/0/task/{number}/supervisors/failed", 1)
            store.add(f"study/0/task/{number}/supervisors/ended", 1)
            store.add(f"study/0/task/{number}/failures", 1)

    statuses, said, out = study_under(tmp_path, act)
    assert statuses == [0, 0], said
    assert not owned.exists() and "stranger" not in said
    assert [record.status for record in read_records(out / "results.jsonl")] == ["ok"] * 3


def test_replayed_messages_are_ignored(tmp_path):
    """The client copies each valid task to the next one, and old heartbeats over new ones."""
    seen: dict[str, bytes] = {}

    def act(store: TCPStore) -> None:
        for number in range(3):
            here, there = (f"{COORDINATOR}/announced/task/{each}" for each in (number, number + 1))
            if not absent(store, here) and absent(store, there):
                store.set(there, store.get(here).decode())
        for number in (0, 1):
            beat = f"{COORDINATOR}/beat/{number}"
            if not absent(store, beat):
                store.set(beat, seen.setdefault(beat, store.get(beat)).decode())

    statuses, said, out = study_under(tmp_path, act)
    records = read_records(out / "results.jsonl")
    # a heartbeat that is always overwritten is a lost supervisor, which ends the study; nothing ran twice
    assert [record.trial for record in records] == ["a", "b", "c"][: len(records)]
    assert statuses == [0, 0] or "Stopped: the supervisor of rank" in said
    # torchrun prints a traceback of its own if the other agent, whose store it uses, has ended first
    assert f'File "{REPOSITORY}/megabench/' not in said, said


def test_deleted_messages_end_the_study_with_one_sentence(tmp_path):
    def act(store: TCPStore) -> None:
        until = time.monotonic() + 0.2  # a supervisor may read a task between two deletions
        while time.monotonic() < until:
            for number in range(1, 4):
                store.delete_key(f"{COORDINATOR}/announced/task/{number}")

    statuses, said, out = study_under(tmp_path, act)
    assert all(statuses) and said.count("Stopped: ") >= 1
    ok = [record.trial for record in read_records(out / "results.jsonl") if record.status == "ok"]
    assert ok in (["a"], ["a", "b"]), "the trials before the first deletion that comes in time"
