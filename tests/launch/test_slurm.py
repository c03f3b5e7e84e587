"""launch/slurm.sbatch and launch/slurm-pyxis.sbatch on a real Slurm with several nodes on this machine."""

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megabench.record import RunRecord
from tests.comparison.compare_process import REPOSITORY
from tests.launch import cluster as slurm

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(slurm.why_not() is not None, reason=f"no Slurm cluster can be started: {slurm.why_not()}"),
]

FLAGS = ["--model", "llama-tiny", "--num-layers", "2", "--seq-length", "64", "--device", "cpu", "--tp", "2"]
SECONDS = 200
# pyxis adds options to srun. This srun writes down the options of pyxis and passes the others to Slurm's srun.
SRUN = f"""#!{sys.executable}
import os, shutil, sys
here = os.path.dirname(os.path.abspath(__file__))
end = sys.argv.index("torchrun")
is_pyxis = [word.startswith(("--container-", "--no-container-")) for word in sys.argv[:end]]
with open(os.path.join(here, "pyxis"), "w") as file:
    file.write(os.linesep.join(word for word, pyxis in zip(sys.argv, is_pyxis) if pyxis))
kept = [word for word, pyxis in zip(sys.argv, is_pyxis) if not pyxis] + sys.argv[end:]
path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != here)
os.execv(shutil.which("srun", path=path), kept)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    with slurm.started(tmp_path_factory.mktemp("slurm"), nodes=4) as running:
        path = f"{Path(sys.executable).parent}:{running.environment['PATH']}"
        running.environment |= {"PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        yield running


@pytest.fixture(scope="module")
def limited(cluster: slurm.Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A training job whose time limit ends while the other tests run, and its folder."""
    folder = tmp_path_factory.mktemp("limited")
    # Slurm looks at time limits every 30 s, so that it sends the signal 25 to 55 s after the start of this job.
    options = ("--time", "1", "--signal", "USR1@5")
    job = cluster.submit(
        "launch/slurm.sbatch",
        *options, "--", "-m", "megabench.train", *endless(folder),
        log=folder / "log", NPROC_PER_NODE="1",
    )  # fmt: skip
    wait_for_text(cluster, folder / "log", r"^step ")
    return job, folder


def endless(folder: Path) -> list[str]:
    """Flags of a run that ends only through a signal."""
    return [*FLAGS, "--steps", "50000", "--save", str(folder / "save"), "--load", str(folder / "save")]


def wait_for_text(cluster: slurm.Cluster, log: Path, pattern: str, seconds: float = 90.0) -> str:
    deadline = time.monotonic() + seconds
    while not re.search(pattern, text := log.read_text() if log.exists() else "", re.MULTILINE):
        assert time.monotonic() < deadline, text + cluster.logs()
        time.sleep(0.2)
    return text


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "save").glob("step-*"))


def test_each_node_runs_one_torchrun(
    limited: tuple[str, Path], cluster: slurm.Cluster, tmp_path: Path
) -> None:
    command = ("launch/pretrain.py", *FLAGS, "--steps", "3", "--out", tmp_path / "run")
    job = cluster.submit("launch/slurm.sbatch", "--", *command, log=tmp_path / "log", NPROC_PER_NODE="2")
    assert cluster.wait(job, SECONDS)["JobState"] == "COMPLETED", (tmp_path / "log").read_text()
    record = RunRecord.read(tmp_path / "run" / "record.json")
    assert (record.world_size, record.layout.tp, record.layout.dp) == (4, 2, 2)


def test_a_requeued_job_resumes_and_a_cancelled_job_saves(
    limited: tuple[str, Path], cluster: slurm.Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    job = cluster.submit(
        "launch/slurm.sbatch", "--", "-m", "megabench.train", *endless(tmp_path), log=log, NPROC_PER_NODE="1"
    )
    wait_for_text(cluster, log, r"^step ")
    cluster.run("scontrol", "requeue", job)
    text = wait_for_text(cluster, log, r"^resum")
    assert len(saved_steps(tmp_path)) == 1, text
    ...
