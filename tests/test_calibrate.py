"""`megabench calibrate` on CPU over gloo: its profile is one that `megabench plan` reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from megabench.planner.profile import read_profile
from tests.study.compare_process import REPOSITORY


def megabench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megabench.cli", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.e2e
def test_a_machine_becomes_a_profile(tmp_path: Path):
    path = tmp_path / "here.json"
    ended = megabench("calibrate", "--out", str(path), "--model", "llama-tiny", "--nproc", "2")
    assert ended.returncode == 0, ended.stderr
    profile = read_profile(path)
    assert profile.kind == "measured" and profile.devices == ["cpu"]
    kinds = {one.kind for one in profile.measurements}
    assert {"product", "attention", "element-wise", "kernel launches", "all-gather", "send", "host copy"} <= kinds
    assert all(one.seconds > 0 for one in profile.measurements)
    assert profile.origin["memory_gb_per_s"] == "megabench calibrate" and "shm" in profile.origin["links"]
    assert "not measured here" in profile.origin["*"]
    planned = megabench("plan", "--cluster", "p5.48xlarge:1", "--profile", str(path))
    assert planned.returncode == 0 and "generic-here" in planned.stdout
