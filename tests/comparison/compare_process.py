"""Compare commands with the fake trainer, as processes that tests watch."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
FAKE = [sys.executable, "tests/comparison/compare_fake.py"]
REAL = [sys.executable, "-m", "megabench", "compare"]

BASE = "base: {model: llama-tiny, steps: 4, warmup_steps: 1, device: cpu}\n"


def start(command: list[str], *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """The command in a plain environment, without what a launcher around the tests may have set."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment | {"PYTHONPATH": str(REPOSITORY)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 240.0) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def compare(*arguments: object, command: list[str] = FAKE, **variables: str) -> tuple[int, str, str]:
    return finish(start(command, *arguments, **variables))


def torchrun(
    nodes: int, processes: int, *arguments: object, script: str = "tests/comparison/compare_fake.py"
) -> list[str]:
    """The command of one of `nodes` torchrun agents that meet at a free port."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(processes)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test"),
        *(script, *map(str, arguments)),
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def running(out: Path) -> dict[str, int]:
    """The processes that the fake trainer noted under `out` and that still run."""
    noted = {str(path.relative_to(out)): int(path.read_text()) for path in out.glob("logs/**/pid-*")}
    return {name: pid for name, pid in noted.items() if _runs(pid)}


def wait_until_running(out: Path, names: Mapping[str, object] | set[str], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not all(name in running(out) for name in names):
        assert time.monotonic() < deadline, f"{sorted(running(out))} run, {sorted(names)} should"
        time.sleep(0.1)


def wait_until_gone(out: Path, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while left := running(out):
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
