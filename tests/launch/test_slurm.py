"""The sbatch files of launch/ on a real Slurm with several nodes on this machine."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megabench.record import RunRecord
from megabench.study.archive import unpack
from megabench.study.results_directory import read_folder
from tests.comparison.compare_process import REPOSITORY
from tests.launch import cluster as slurm

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(slurm.why_not() is not None, reason=f"no Slurm cluster can be started: {slurm.why_not()}"),
]

FLAGS = ["--model", "llama-tiny", "--num-layers", "2", "--seq-length", "64", "--device", "cpu", "--tp", "2"]
SCRIPT = "launch/slurm.sbatch"
SECONDS = 250
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
    with slurm.started(tmp_path_factory.mktemp("slurm"), nodes=6) as running:
        path = f"{Path(sys.executable).parent}:{running.environment['PATH']}"
        running.environment |= {"PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        yield running


@pytest.fixture(scope="module")
def jobs(cluster: slurm.Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """Two training jobs and their folders. The time limit of one is near, and the other one is preempted.

    Slurm looks at both only every 30 s, so one fixture starts both.
    """
    limited, preempted = tmp_path_factory.mktemp("limited"), tmp_path_factory.mktemp("preempted")
    options = ("--time", "10", "--signal", "USR1@120", "--")
    first = cluster.submit(SCRIPT, *options, "launch/pretrain.py", *endless(limited), folder=limited, processes=2)
    command = ("--", "-m", "megabench.train", *endless(preempted))
    second = cluster.submit(SCRIPT, *command, folder=preempted, processes=1)
    wait_for_text(cluster, first, limited, r"^step ")
    wait_for_text(cluster, second, preempted, r"^step ")
    minutes = int(cluster.state(first)["RunTime"].split(":")[1]) + 2  # one to two minutes from now
    cluster.run("scontrol", "update", f"JobId={first}", f"TimeLimit={minutes}")  # the signal is due at once
    urgent = ("--partition", "urgent", "--nodelist", cluster.state(second)["NodeList"], "--output", "/dev/null")
    cluster.run("sbatch", "--exclusive", *urgent, "--wrap", "sleep 1")
    return {"limited": (first, limited), "preempted": (second, preempted)}


def endless(folder: Path) -> list[str]:
    """Flags of a run that ends only through a signal."""
    directories = ["--save", str(folder / "save"), "--load", str(folder / "save"), "--out", str(folder / "run")]
    return [*FLAGS, "--steps", "50000", "--callbacks", "tests.launch.pause:Pause", *directories]


def wait_for_text(cluster: slurm.Cluster, job: str, folder: Path, pattern: str) -> None:
    """Wait until the output of the job in `folder` matches `pattern`."""
    deadline = time.monotonic() + SECONDS
    while not re.search(pattern, text := output(folder), re.MULTILINE):
        assert cluster.is_alive(job) and time.monotonic() < deadline, text
        time.sleep(0.5)


def output(folder: Path) -> str:
    return (folder / "log").read_text() if (folder / "log").exists() else ""


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "save").glob("step-*"))


def read_record(folder: Path) -> RunRecord:
    return RunRecord.read(folder / "run" / "record.json")


@pytest.mark.usefixtures("jobs")
def test_pyxis_and_efa_options_reach_srun(cluster: slurm.Cluster, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    show = tmp_path / "show.py"
    show.write_text(
        "import os\nprint({name: os.environ.get(name) for name in ('FI_PROVIDER', 'NCCL_SOCKET_IFNAME')})\n"
    )
    job = cluster.submit(
        "launch/slurm-pyxis.sbatch",
        *("--", show),
        folder=tmp_path,
        processes=1,
        PATH=f"{tmp_path / 'bin'}:{cluster.environment['PATH']}",
        CONTAINER_IMAGE="registry#megabench:1",
        CONTAINER_MOUNTS="/fsx:/fsx",
        USE_EFA="yes",
        NCCL_SOCKET_IFNAME="ens5",
    )
    assert cluster.wait(job, SECONDS) == "COMPLETED", output(tmp_path)
    assert (tmp_path / "bin" / "pyxis").read_text().splitlines() == [
        "--container-image=registry#megabench:1",
        f"--container-mounts={REPOSITORY}:{REPOSITORY},/fsx:/fsx",
        f"--container-workdir={REPOSITORY}",
        "--no-container-mount-home",
    ]
    # the file's value, and the value that the user has set
    assert output(tmp_path).count("{'FI_PROVIDER': 'efa', 'NCCL_SOCKET_IFNAME': 'ens5'}") == 2, output(tmp_path)


def test_both_scripts_have_the_same_sbatch_options() -> None:
    plain, pyxis = (
        re.findall(r"^#SBATCH .*", (REPOSITORY / f"launch/{name}.sbatch").read_text(), re.MULTILINE)
        for name in ("slurm", "slurm-pyxis")
    )
    assert plain and plain == pyxis


def test_each_node_runs_one_torchrun_which_saves_before_the_time_limit(
    cluster: slurm.Cluster, jobs: dict[str, tuple[str, Path]]
) -> None:
    job, folder = jobs["limited"]
    cluster.wait(job, SECONDS)
    record = read_record(folder)
    assert (record.world_size, record.layout.tp, record.layout.dp) == (4, 2, 2), output(folder)
    assert record.stopped_by == "SIGUSR1" and len(saved_steps(folder)) == 1, output(folder)


def test_a_preempted_job_saves_and_resumes_and_a_cancelled_job_saves(
    cluster: slurm.Cluster, jobs: dict[str, tuple[str, Path]]
) -> None:
    job, folder = jobs["preempted"]
    wait_for_text(cluster, job, folder, r"^saved step ")
    [step] = saved_steps(folder)
    wait_for_text(cluster, job, folder, rf"^step +{step + 1}/")
    cluster.run("scancel", job)
    assert cluster.wait(job, SECONDS) == "CANCELLED", output(folder)
    assert len(saved_steps(folder)) == 2 and read_record(folder).stopped_by == "SIGTERM", output(folder)


def crossover(cluster: slurm.Cluster, folder: Path, *options: str) -> str:
    """Submit the small crossover study, whose results go to `folder`/study, and return the number of the job."""
    arguments = ("--", "crossover-efa-small", "--emulate-hosts", "2", *options)
    script = "launch/crossover-efa.sbatch"
    return cluster.submit(script, *arguments, folder=folder, processes=2, OUT=str(folder / "study"))


def test_the_crossover_on_two_nodes_returns_an_archive(cluster: slurm.Cluster, tmp_path: Path) -> None:
    """All six trials run, which takes about two minutes."""
    job = crossover(cluster, tmp_path)
    assert cluster.state(job)["TimeLimit"] == "00:30:00" and cluster.state(job)["NumNodes"] == "2-2"
    assert cluster.wait(job, 2 * SECONDS) == "COMPLETED", output(tmp_path)
    found = read_folder(unpack(tmp_path / "study.tar.gz", tmp_path / "record"))
    trials = ["zero3-kept", "zero3-hpz", "hsdp", "pp2-across", "tp2-dp2", "tp2-pp2-across"]
    assert [record.trial for record in found.records] == trials, output(tmp_path)
    for record in found.records:
        assert (record.status, record.world_size, record.num_hosts) == ("ok", 4, 2), output(tmp_path)
        assert record.parity and record.parity.verdict == "equal"


def test_a_crossover_that_is_stopped_packs_its_records_and_continues(cluster: slurm.Cluster, tmp_path: Path) -> None:
    """Slurm sends this signal two minutes before the time limit."""
    options = ("--only", "zero3-kept", "--only", "hsdp", "--only", "tp2-dp2")
    job = crossover(cluster, tmp_path, *options)
    wait_for_text(cluster, job, tmp_path, r"^\[1/3\] zero3-kept ok")
    cluster.run("scancel", "--signal", "USR1", job)
    assert cluster.wait(job, SECONDS) == "FAILED", output(tmp_path)
    found = read_folder(unpack(tmp_path / "study.tar.gz", tmp_path / "part"))
    assert found.records[0].trial == "zero3-kept" and len(found.records) < 3, output(tmp_path)
    job = crossover(cluster, tmp_path, *options)
    assert cluster.wait(job, SECONDS) == "COMPLETED", output(tmp_path)
    found = read_folder(unpack(tmp_path / "study.tar.gz", tmp_path / "whole"))
    assert [record.trial for record in found.records] == ["zero3-kept", "hsdp", "tp2-dp2"], output(tmp_path)
