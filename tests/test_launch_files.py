"""launch/slurm.sbatch and launch/kubernetes.yaml as a cluster runs them, with both nodes on this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megabench.config import SETTINGS
from megabench.record import RunRecord
from tests.comparison.compare_process import REPOSITORY, free_port, start

pytestmark = pytest.mark.e2e

FLAGS = ["--model", "llama-tiny", "--num-layers", "2", "--seq-length", "64", "--device", "cpu", "--tp", "2"]
SECONDS = 200
# srun starts the command once a node and ends with the worst status; told to end, it kills its tasks at once
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
command = sys.argv[sys.argv.index("torchrun"):]
nodes = [subprocess.Popen(command) for _ in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
signal.signal(signal.SIGTERM, lambda number, frame: [node.kill() for node in nodes])
sys.exit(max(abs(node.wait()) for node in nodes))
"""


@contextmanager
def started(*commands: list[str], **variables: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The commands, running; at the end nothing below them is left."""
    running = [start(command, **variables) for command in commands]
    try:
        yield running
    finally:
        for process in running:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                for member in [*root.children(recursive=True), root]:
                    member.kill()
            process.wait()


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a Slurm job of two nodes, in which srun and scontrol stand in for Slurm's."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\necho elsewhere\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": free_job_id(), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    return slurm | {"PATH": path, "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}


def free_job_id() -> str:
    """One of which the script makes a port that nobody listens on."""
    for number in range(os.getpid() % 9000, 10000):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 20000 + number)):
                return str(number)
    raise AssertionError("no port is free")


def batch(*flags: object) -> list[str]:
    return ["bash", "launch/slurm.sbatch", "launch/pretrain.py", *FLAGS, *map(str, flags)]


def test_slurm_runs_one_torchrun_a_node(job: dict[str, str], tmp_path: Path) -> None:
    with started(batch("--steps", 3, "--out", tmp_path / "run"), **job) as [script]:
        _, stderr = script.communicate(timeout=SECONDS)
    assert script.returncode == 0, stderr
    record = RunRecord.read(tmp_path / "run" / "record.json")
    assert (record.world_size, record.layout.tp, record.layout.dp) == (4, 2, 2)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_a_job_that_is_to_end_saves(job: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    """Slurm warns the tasks (SIGUSR1), or tells them and the batch script to end (SIGTERM)."""
    flags = ("--steps", 5000, "--save", tmp_path / "save", "--out", tmp_path / "run")
    with started(batch(*flags), **job) as [script]:
        assert script.stdout
        head = ""
        while not re.search(r"^step ", head, re.MULTILINE):
            head += (line := script.stdout.readline())
            assert line, head
        below = psutil.Process(script.pid).children(recursive=True)
        tasks = [process for process in below if any(word.endswith("/torchrun") for word in process.cmdline())]
        assert len(tasks) == 2
        for task in [*tasks, *([psutil.Process(script.pid)] if number == signal.SIGTERM else [])]:
            task.send_signal(number)
        tail, stderr = script.communicate(timeout=SECONDS)
    record = RunRecord.read(tmp_path / "run" / "record.json")
    assert record.stopped_by == number.name, head + tail + stderr
    assert [path.name for path in (tmp_path / "save").glob("step-*")] == [f"step-{len(record.losses):08d}"]


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((REPOSITORY / "launch/kubernetes.yaml").read_text())
    return service, job


def test_the_pods_of_the_manifest_find_each_other() -> None:
    service, job = manifest()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"] and spec["completionMode"] == "Indexed"
    assert f"--nnodes={spec['completions']}" in command and spec["parallelism"] == spec["completions"]
    # Kubernetes calls the first pod of an indexed job by the job's name and its index, below the service's
    first_pod = f"{job['metadata']['name']}-0.{service['metadata']['name']}.$(NAMESPACE).svc.cluster.local"
    assert any(flag.startswith(f"--rdzv-endpoint={first_pod}:") for flag in command)
    assert "NAMESPACE" in [entry["name"] for entry in pod["containers"][0]["env"]]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_command_of_the_manifest_trains(tmp_path: Path) -> None:
    container = manifest()[1]["spec"]["template"]["spec"]["containers"][0]
    command = container["command"]
    launcher = command[: command.index("launch/pretrain.py") + 1]
    here = {"--nproc-per-node": "2", "--rdzv-endpoint": f"localhost:{free_port()}"}
    launcher = [f"{name}={here[name]}" if (name := flag.split("=")[0]) in here else flag for flag in launcher]
    variables = {entry["name"]: entry.get("value", "default") for entry in container["env"]}
    torchrun = [str(Path(sys.executable).parent / launcher[0]), *launcher[1:]]
    pod = [*torchrun, *FLAGS, "--steps", "3", "--out", str(tmp_path / "run")]
    with started(pod, pod, **variables, OMP_NUM_THREADS="1") as pods:
        printed = [each.communicate(timeout=SECONDS) for each in pods]
    assert [each.returncode for each in pods] == [0, 0], printed
    assert RunRecord.read(tmp_path / "run" / "record.json").world_size == 4
    given = [flag.removeprefix("--").split("=")[0].replace("-", "_") for flag in command[len(launcher) :]]
    assert set(given) <= {*SETTINGS}
