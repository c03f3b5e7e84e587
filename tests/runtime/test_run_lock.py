"""A folder has one writer: a second run of this host is refused, and one whose folder was taken over stops writing."""

import json
import os
import resource
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import psutil
import pytest

from megabench.checkpoint.directory import steps_in
from megabench.record import RunRecord
from megabench.runtime.run_lock import RunLock, RunLockedError, check_free
from tests.train.resilience import Run


def write_claim(folder: Path, **changes: object) -> None:
    owner = {"token": "1f", "host": "another-host", "pid": 4242, "began": 0.0, "since": "2026-01-01 00:00:00 +0000"}
    (folder / ".claim.json").write_text(json.dumps(owner | changes))


def claimed_here(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / ".claim.json").read_text()))


def test_a_claim_is_mine_until_another_host_takes_it(tmp_path):
    claim = RunLock(tmp_path)
    again = RunLock(tmp_path)  # --out and --save may be one folder
    assert claim.loss is None and again.loss is None
    write_claim(tmp_path)
    assert claim.loss and claim.loss.startswith(
        "process 4242 of another-host (since 2026-01-01 00:00:00 +0000) has taken"
    )
    check_free(tmp_path)  # who wrote from another host may be dead
    claim = RunLock(tmp_path)
    assert claim.loss is None
    (tmp_path / ".claim.json").unlink()  # taken over by one that has ended since
    assert claim.loss and claim.loss.startswith(f"the lock of {tmp_path} is gone: another run has ended there")
    claim = RunLock(tmp_path)
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_who_is_alive_here_is_not_taken_over(tmp_path):
    RunLock(tmp_path)
    mine = claimed_here(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        began = psutil.Process(other.pid).create_time() - psutil.boot_time()
        write_claim(tmp_path, host=mine["host"], pid=other.pid, began=began)
        with pytest.raises(
            RunLockedError, match=f"process {other.pid} of .* writes into {tmp_path}; stop that process first"
        ):
            RunLock(tmp_path)
        assert claimed_here(tmp_path)["pid"] == other.pid
        other.communicate(b"\n")
    check_free(tmp_path)
    write_claim(tmp_path, host=mine["host"], pid=os.getppid(), began=1.0)  # a later process of the same number
    assert RunLock(tmp_path).loss is None


all_claimants: Barrier  # in each process of the pool


def set_up_claimant(barrier: Barrier) -> None:
    global all_claimants
    all_claimants = barrier


def claim_together(folder: Path) -> str:
    """Why this process, which lives on, did not get the lock. All processes of the pool claim it at the same time."""
    all_claimants.wait()
    try:
        RunLock(folder)
    except RunLockedError as error:
        return str(error)
    return ""


def test_of_two_at_once_one_gets_it(tmp_path):
    context = get_context("spawn")
    with ProcessPoolExecutor(4, context, initializer=set_up_claimant, initargs=(context.Barrier(4),)) as pool:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            said = sorted(pool.map(claim_together, [folder] * 4))
            assert [bool(text) for text in said] == [False, True, True, True], said
            assert all(f"writes into {folder}; stop that process first" in text for text in said[1:])
            assert [path.name for path in folder.iterdir()] == [".claim.json"]


def test_the_clock_is_set(tmp_path, monkeypatch):
    mine = RunLock(tmp_path)
    before = psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: before + 3600)
    assert mine.loss is None


def test_what_is_no_claim_is_nobodys(tmp_path):
    claim = RunLock(tmp_path)
    for text in ("", "{}", "[1]", '{"host": "x"}'):
        (tmp_path / ".claim.json").write_text(text)
        assert claim.loss is None
        check_free(tmp_path)


def test_a_run_started_twice_is_refused(tmp_path):
    flags = ("--out", tmp_path / "out", "--save", tmp_path / "save", "--steps", 2000, "--save-every", 2)
    first = Run.start(2, *flags)
    try:
        first.wait_for("step +[2-9]/2000|saved")
        for names in (("--out", tmp_path / "out"), ("--save", tmp_path / "save")):
            second = Run.start(2, *names, "--steps", 4)
            assert second.finish() != 0
            assert f"writes into {names[1]}; stop that process first, or use another directory" in second.output
        assert first.process.poll() is None
        # a job that was submitted twice, and started on another host
        write_claim(tmp_path / "save")
        assert first.finish() == 1
    finally:
        for process in first.alive():
            process.kill()
    assert "process 4242 of another-host" in first.output and "was this job started twice?" in first.output
    assert steps_in(tmp_path / "save") and not list((tmp_path / "save").glob("*.partial"))
    assert not (tmp_path / "out" / "record.json").exists()


def test_a_record_that_finds_no_room_is_told(tmp_path):
    """Files may not grow beyond 2 kB, a record's are more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 10, resource.RLIM_INFINITY))
    try:
        run = Run.start(2, "--out", tmp_path, "--steps", 3)
        assert run.finish() == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert f"Error: {tmp_path}/record.json could not be written: File too large\n" in run.output
    assert "step 3/3 100%" in run.output


def test_a_record_does_not_replace_that_of_who_took_over(tmp_path):
    run = Run.start(2, "--out", tmp_path, "--steps", 60)
    run.wait_for("step +[1-9]")
    write_claim(tmp_path)
    assert run.finish() == 1
    (kept,) = tmp_path.glob("record*.json")
    assert kept.name.startswith("record-of-") and RunRecord.read(kept).num_steps == 60
    assert f"was this job started twice? This run's record is {kept}" in run.output


def test_a_folder_that_takes_no_files(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunLockedError, match="file is not writable: Not a directory; use another directory"):
        RunLock(tmp_path / "file")
