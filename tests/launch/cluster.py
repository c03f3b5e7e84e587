"""A Slurm cluster of several nodes on this machine: munged, slurmctld and one slurmd per node, in one directory."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.comparison.compare_process import REPOSITORY

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")

# Nodes have loopback addresses as names, because the script passes the name of the first node to torchrun.
# KillWait: seconds between SIGTERM and SIGKILL. cred_expire: Slurm waits this long before it starts a requeued job;
# 5 s is the minimum. SchedulerParameters: start jobs within a second instead of a minute.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
MpiDefault=none
ReturnToService=2
FirstJobId={first_job}
KillWait=60
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MailProg=/bin/true
NodeName=127.0.0.[1-{nodes}] NodeHostname=localhost Port=[{first_node_port}-{last_node_port}] CPUs=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def why_not() -> str | None:
    """Return why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge" if missing else None


class Cluster:
    """Submits jobs and asks for their state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}

    def run(self, *command: object, **variables: str) -> str:
        done = subprocess.run(
            list(map(str, command)),
            env=self.environment | variables,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, *arguments: object, folder: Path, processes: int, **variables: str) -> str:
        """Submit `script` on two nodes with `processes` each, and return the number of the job.

        `arguments` are options of sbatch, the word --, and arguments of the script. The output goes to `folder`/log.
        """
        split = arguments.index("--")
        options = ["--parsable", "--nodes", "2", "--output", folder / "log", *arguments[:split]]
        more = variables | {"NPROC_PER_NODE": str(processes)}
        return self.run("sbatch", *options, script, *arguments[split + 1 :], **more).strip()

    def state(self, job: str) -> dict[str, str]:
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def is_alive(self, job: str) -> bool:
        return self.state(job)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    def wait(self, job: str, seconds: float) -> str:
        """Wait until the job has ended and return its state."""
        deadline = time.monotonic() + seconds
        while self.is_alive(job):
            assert time.monotonic() < deadline, f"job {job} is still alive"
            time.sleep(0.5)
        return self.state(job)["JobState"]


@contextmanager
def started(folder: Path, nodes: int) -> Iterator[Cluster]:
    """Start the daemons, and end all of them and all their processes afterwards."""
    ports = _free_ports(nodes + 1)
    first_job = os.getpid() % 9000 + 1  # from which launch/slurm.sbatch makes the port of the rendezvous
    text = CONFIGURATION.format(
        folder=folder,
        nodes=nodes,
        port=ports[-1],
        first_node_port=ports[0],
        last_node_port=ports[-2],
        first_job=first_job,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    cluster = Cluster(folder)
    munge = [f"--{name}={folder / file}" for name, file in {
        "socket": "munge.socket", "key-file": "munge.key", "log-file": "munge.log",
        "pid-file": "munge.pid", "seed-file": "munge.seed",
    }.items()]  # fmt: skip
    names = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
    for name in names:
        (folder / f"spool-{name}").mkdir()
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D"],
            *(["slurmd", "-D", "-N", name] for name in names),
        ):
            daemons.append(
                subprocess.Popen(command, env=cluster.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            if command[0] == "munged":
                _wait_for(lambda: (folder / "munge.socket").exists())
        _wait_for(lambda: cluster.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(nodes))
        yield cluster
    finally:
        _end(daemons, folder)


def _end(daemons: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """End the daemons and everything that they started. slurmstepd leaves the process tree of slurmd."""
    marker = f"SLURM_CONF={folder / 'slurm.conf'}"
    ours = [process for process in psutil.process_iter() if _has(process, marker)]
    for process in ours:
        if process.pid != os.getpid():
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                process.kill()
    for daemon in daemons:
        daemon.kill()
        daemon.wait()


def _has(process: psutil.Process, marker: str) -> bool:
    try:
        return marker in (f"{name}={value}" for name, value in process.environ().items())
    except (psutil.Error, OSError):
        return False


def _wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the daemon did not start"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Return consecutive ports on which nobody listens."""
    for first in range(10000 + os.getpid() % 9000, 20000):
        with socket.socket() as probe:
            busy = [port for port in range(first, first + count) if probe.connect_ex(("localhost", port)) == 0]
        if not busy:
            return list(range(first, first + count))
    raise AssertionError("no ports are free")


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
