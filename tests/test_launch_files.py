"""launch/slurm.sbatch and launch/kubernetes.yaml as a cluster runs them, with both nodes on this machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megabench.config import RunConfig
from megabench.record import RunRecord
from tests.study.compare_process import free_port

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
FLAGS = ["--model", "llama-tiny", "--num-layers", "2", "--seq-length", "64", "--device", "cpu", "--tp", "2"]
# srun starts the same command once a node, passes signals on, and ends with the worst status
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
command = sys.argv[sys.argv.index("torchrun"):]
nodes = [subprocess.Popen(command, start_new_session=True) for _ in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
signal.signal(signal.SIGUSR1, lambda number, frame: [node.send_signal(number) for node in nodes])
sys.exit(max(abs(node.wait()) for node in nodes))
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes, in which srun and scontrol stand in for Slurm's."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\necho elsewhere\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    return os.environ | job | {"PATH": path, "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}


def test_slurm_runs_one_torchrun_a_node(slurm: dict[str, str], tmp_path: Path) -> None:
    command = [
        "bash",
        "launch/slurm.sbatch",
        "launch/pretrain.py",
        *FLAGS,
        "--steps",
        "3",
        "--out",
        str(tmp_path / "run"),
    ]
    subprocess.run(command, cwd=ROOT, env=slurm, timeout=240, check=True)
    record = RunRecord.read(tmp_path / "run" / "record.json")
    assert (record.world_size, record.layout.tp, record.layout.dp) == (4, 2, 2)


def test_a_warned_slurm_job_saves(slurm: dict[str, str], tmp_path: Path) -> None:
    folders = ["--save", str(tmp_path / "save"), "--out", str(tmp_path / "run")]
    command = ["bash", "launch/slurm.sbatch", "launch/pretrain.py", *FLAGS, "--steps", "100000", *folders]
    with subprocess.Popen(
        command, cwd=ROOT, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout
        printed = ""
        while "step " not in printed:
            printed += (line := job.stdout.readline())
            assert line, printed
        time.sleep(1)
        job.send_signal(signal.SIGUSR1)
        printed += job.communicate(timeout=120)[0]
    record = RunRecord.read(tmp_path / "run" / "record.json")
    assert record.stopped_by == "SIGUSR1", printed
    assert [path.name for path in (tmp_path / "save").glob("step-*")] == [f"step-{len(record.losses):08d}"]


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text())
    return service, job


def test_the_pods_of_the_manifest_find_each_other() -> None:
    service, job = manifest()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"] and spec["completionMode"] == "Indexed"
    assert f"--nnodes={spec['completions']}" in command and spec["parallelism"] == spec["completions"]
    # Kubernetes calls the first pod of an indexed job by the job's name and its index, below the service's
    first_pod = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert any(flag.startswith(f"--rdzv-endpoint={first_pod}:") for flag in command)
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_command_of_the_manifest_trains(tmp_path: Path) -> None:
    container = manifest()[1]["spec"]["template"]["spec"]["containers"][0]
    command = container["command"]
    launcher = command[: command.index("launch/pretrain.py") + 1]
    here = {"--nproc-per-node": "2", "--rdzv-endpoint": f"localhost:{free_port()}"}
    launcher = [f"{name}={here[name]}" if (name := flag.split("=")[0]) in here else flag for flag in launcher]
    environment = os.environ | {entry["name"]: entry["value"] for entry in container["env"]} | {"OMP_NUM_THREADS": "1"}
    torchrun = [str(Path(sys.executable).parent / launcher[0]), *launcher[1:]]
    flags = [*FLAGS, "--steps", "3", "--out", str(tmp_path / "run")]
    pods = [subprocess.Popen([*torchrun, *flags], cwd=ROOT, env=environment) for _ in range(2)]
    assert [pod.wait(240) for pod in pods] == [0, 0]
    assert RunRecord.read(tmp_path / "run" / "record.json").world_size == 4
    given = [flag.removeprefix("--").split("=")[0].replace("-", "_") for flag in command[len(launcher) :]]
    assert set(given) <= set(RunConfig.model_fields)
