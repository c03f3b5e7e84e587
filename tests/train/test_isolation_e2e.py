"""What a run exposes and leaves behind: its listening sockets, and its processes when torchrun is killed."""

import re
import shutil
import time
from pathlib import Path

import psutil
import pytest

from tests.comparison.compare_process import REAL, start
from tests.train.resilience import Run

pytestmark = pytest.mark.e2e

LOOPBACK = ("127.", "::1", "::ffff:127.")
STUDY = """
base: {model: llama-tiny, num_layers: 2, seq_length: 64, data: synthetic, device: cpu, steps: 40, world_size: 2}
trials: [{engine: ddp}, {tp: 2}, {engine: deepspeed}, {engine: fsdp}]
"""


def listening(process: psutil.Process) -> set[str]:
    """The addresses at which a process listens."""
    try:
        sockets = process.net_connections("inet")
    except psutil.Error:
        return set()
    return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}


def exposed(processes: list[psutil.Process]) -> set[str]:
    return {address for each in processes for address in listening(each) if not address.startswith(LOOPBACK)}


def test_the_ranks_of_one_host_listen_on_loopback_only() -> None:
    run = Run.start(2, "--tp", 2, "--steps", 12)
    run.wait_for(r"^step +4/")
    ranks = run.alive()
    assert any(listening(rank) for rank in ranks), "gloo and the store listen somewhere"
    assert not exposed(ranks)
    assert run.finish() == 0, run.output


def test_a_study_on_one_host_listens_on_loopback_only(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY)
    process = start(REAL, study, "--out", tmp_path / "out")
    supervisor, seen, wrong = psutil.Process(process.pid), 0, set[str]()
    while process.poll() is None:
        family = [supervisor, *supervisor.children(recursive=True)]
        seen += len(family) > 2 and any(map(listening, family))
        wrong |= exposed(family)
        time.sleep(1)
    assert process.returncode == 0, process.communicate()
    assert seen > 4 and not wrong


def test_no_rank_outlives_a_killed_torchrun() -> None:
    """torchrun is killed while its ranks import, wait for the store, or initialize."""
    runs = []
    for delay in (0.0, 0.3, 0.6, 1.0, 2.0):
        run = Run.start(1, "--steps", 400)
        while not run.alive():
            time.sleep(0.01)
        time.sleep(delay)
        run.process.kill()
        runs.append(run)
    deadline = time.monotonic() + 300
    while left := [process for run in runs for process in run.alive()]:
        if time.monotonic() > deadline:
            for process in left:
                process.kill()
            raise AssertionError(f"{left} still run after 300 s")
        time.sleep(0.5)


def test_a_frozen_store_is_noticed() -> None:
    """Without torchrun, rank 0 hosts the store: while its process is frozen, no call of the store returns."""
    run = Run.start(2, "--tp", 2, "--steps", 400, "--stall-seconds", 5, srun=True)
    run.wait_for(r"^step +4/")
    run.rank(0).suspend()
    assert run.finish() != 0 and not run.alive()
    assert "made no progress, and the rendezvous store has not answered for" in run.output


def test_a_deleted_save_directory_is_one_error_message(tmp_path: Path) -> None:
    """The run has more steps than it can finish before the deletion, and sees each directory whole or not at all."""
    run = Run.start(2, "--steps", 4000, "--save", tmp_path / "save", "--save-every", 2, "--out", tmp_path / "out")
    run.wait_for(r"^step +6/")
    for name in ("save", "out"):
        shutil.rmtree((tmp_path / name).rename(tmp_path / f"deleted-{name}"), ignore_errors=True)
    assert run.finish() == 1
    (error,) = [line for line in run.output.splitlines() if line.startswith("Error: ")]
    assert re.search(
        r"no longer exists, because it was deleted|is gone: another run has ended there, or the files were deleted",
        error,
    )
    assert error.endswith("; this run has no checkpoint")
    assert "Traceback" not in run.output.split(error)[0]
