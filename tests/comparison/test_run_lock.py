"""Whose folder a study writes into: its own, one study's at a time, and nobody's files are written over."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.comparison.compare_process import BASE, FAKE, compare, finish, running, start, torchrun, wait_until_running

pytestmark = pytest.mark.distributed
WAITS = BASE + (
    "timeout_seconds: 240\ntrials: [{name: a, world_size: 2}, "
    "{name: b, world_size: 2, seed: 1, env: {FAULT: hang, FAULT_RANK: 1}}]"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def test_a_study_started_twice_ends_once(tmp_path):
    study, out = write(tmp_path, WAITS), tmp_path / "out"
    first = start(FAKE, study, "--out", out)
    wait_until_running(out, {"logs/b/pid-1"})
    before = (out / "results.jsonl").read_bytes()
    status, _, stderr = compare(study, "--out", out, "--resume")
    assert (
        status == 2 and f"process {first.pid} of " in stderr and f"writes into {out}; stop that process first" in stderr
    )
    assert first.poll() is None
    # the same command, on another host
    owner = {"host": "another-host", "pid": 4242, "began": 0.0, "since": "2026-01-01", "token": "1f"}
    (out / ".claim.json").write_text(json.dumps(owner))
    os.kill(running(out)["logs/b/pid-1"], signal.SIGKILL)  # the study notices when it writes the result
    status, _, stderr = finish(first)
    assert status == 2 and "Traceback" not in stderr
    assert stderr.endswith(
        f"Error: process 4242 of another-host (since 2026-01-01) has taken over {out}: was this job started twice?\n"
    )
    assert (out / "results.jsonl").read_bytes() == before
    assert compare(write(tmp_path, WAITS.replace("FAULT: hang", "FAULT: ''")), "--out", out, "--resume")[0] == 0


@pytest.mark.parametrize("name", ["study.yaml", "logs/dp2", "tensorboard/dp2"])
def test_what_no_study_has_written_stays(tmp_path, name):
    study, out = write(tmp_path, BASE + "trials: [{world_size: 2}]"), tmp_path / "out"
    out.mkdir()
    if name == "study.yaml":
        (out / name).write_text("mine")
    else:
        (out / name).mkdir(parents=True)
    status, _, stderr = compare(study, "--out", out)
    assert status == 2 and f"{out / name} already exists and was not written by a study; use another --out" in stderr
    assert [path.name for path in out.iterdir()] == [name.partition("/")[0]]


def test_a_study_may_lie_where_it_writes(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "logs").mkdir()  # a scheduler's
    text = BASE + "# mine\ntrials: [{world_size: 2}]"
    study = write(folder, text)
    status, _, stderr = compare(study, "--out", tmp_path / "link", "--set", "seed=5")
    assert status == 2 and f"{study} would be overwritten" in stderr
    assert compare(study, "--out", tmp_path / "link")[0] == 0
    assert compare(study, "--out", folder, "--resume")[0] == 0
    assert study.read_text() == text


def test_all_supervisors_end_alike_where_the_folder_is_lost(tmp_path):
    study, out = write(tmp_path, WAITS), tmp_path / "out"
    first = start(torchrun(1, 2, study, "--out", out))
    wait_until_running(out, {"logs/b/pid-1"})
    (out / ".claim.json").unlink()  # another study was here, and has ended
    os.kill(running(out)["logs/b/pid-1"], signal.SIGKILL)
    _, stdout, stderr = finish(first)
    assert (stdout + stderr).count(f"Error: the lock of {out} is gone") == 1
    assert "--resume goes on" not in stdout + stderr and "Stopped" not in stdout + stderr
