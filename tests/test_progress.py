"""Commands show that they run: every two seconds in a terminal, and now and then in a file."""

import os
import pty
import re
import subprocess
import sys
import time
from io import StringIO

import pytest
from rich.console import Console

from megabench import terminal
from megabench.runtime.messages import Progress
from megabench.terminal import ProgressLine
from tests.comparison.compare_process import BASE, FAKE, REPOSITORY, compare
from tests.comparison.test_runner import write

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PRETRAIN = [sys.executable, "tests/comparison/pretrain_fake.py", "--model", "llama-tiny", "--device", "cpu"]


def in_terminal(command: list[str], **variables: str) -> list[tuple[float, str]]:
    """Run a command in a terminal of its own. Return what it printed, each piece with its time in seconds."""
    lead, follow = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "200"} | variables
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=follow, stderr=follow)
    os.close(follow)
    pieces = []
    try:
        while piece := os.read(lead, 65536):
            pieces.append((time.monotonic(), CONTROL.sub("", piece.decode(errors="replace"))))
    except OSError:  # Linux reports the end of the other side as an error
        pass
    finally:
        os.close(lead)
    text = "".join(text for _, text in pieces)
    assert process.wait(240) == 0, text
    return pieces


def moves(pieces: list[tuple[float, str]], end: str) -> bool:
    """Whether something was printed in two of three seconds, from the first piece to the one that contains `end`.

    A busy machine may delay single pieces.
    """
    last = next(number for number, (_, text) in enumerate(pieces) if end in text)
    seconds = [int(moment - pieces[0][0]) for moment, _ in pieces[: last + 1]]
    return len({*seconds}) >= 2 / 3 * (seconds[-1] + 1)


def text_of(pieces: list[tuple[float, str]]) -> str:
    return "".join(text for _, text in pieces)


@pytest.mark.distributed
def test_a_silent_trial_keeps_the_line_moving(tmp_path):
    study = write(tmp_path, BASE + "trials: [{name: slow, env: {SLEEP: 5}}]")
    pieces = in_terminal([*FAKE, str(study), "--out", str(tmp_path / "out"), "--nproc", "1"])
    assert moves(pieces, "[1/1] slow ok")
    assert len({*re.findall(r"\[1/1\] slow starting \((\d+) s\)", text_of(pieces))} - {"0"}) >= 3


@pytest.mark.distributed
def test_short_runs_keep_the_line_moving(tmp_path):
    variables = {"SECONDS": "1:4.0 2:3.0 4:2.7 8:oom", "SLEEP": "3"}
    trials = "trials: [{name: a, micro_batch: auto, env: {" + ", ".join(f"{k}: '{v}'" for k, v in variables.items())
    study = write(tmp_path, BASE + trials + "}}]")
    pieces = in_terminal([*FAKE, str(study), "--out", str(tmp_path / "out"), "--nproc", "1"])
    shown = "[1/1] a auto-tuning, short run 2 of at most 4, trying micro-batch 2, recompute none: starting"
    assert shown in text_of(pieces) and moves(pieces, "[1/1] a ok")
    flags = ["--global-batch", "8", "--micro-batch", "auto", "--num-layers", "1", "--seq-length", "32", "--steps", "1"]
    pieces = in_terminal([*PRETRAIN, *flags], **variables)
    shown = "auto-tuning, short run 3 of at most 4, trying micro-batch 8, recompute none: starting"
    assert shown in text_of(pieces) and moves(pieces, "chosen: micro-batch 4")


@pytest.mark.e2e
def test_calibration_shows_each_measurement(tmp_path):
    flags = ["calibrate", "--out", str(tmp_path / "here.json"), "--model", "llama-tiny", "--nproc", "2"]
    pieces = in_terminal([sys.executable, "-m", "megabench", *flags])
    assert moves(pieces, "measurements in")
    shown = re.findall(r"measurement (\d+) of (\d+): [a-z -]+", text_of(pieces))
    measured = re.search(r"(\d+) measurements in", text_of(pieces))
    assert measured and {total for _, total in shown} == {measured[1]}
    assert len({number for number, _ in shown}) > 3


@pytest.mark.distributed
def test_a_file_receives_two_lines_of_a_short_trial(tmp_path):
    study = write(tmp_path, BASE + "trials: [{name: slow, env: {SLEEP: 3}}]")
    status, stdout, stderr = compare(study, "--out", tmp_path / "out", "--nproc", 1, FORCE_COLOR="1")
    assert status == 0, stderr
    assert [line[:12] for line in stdout.splitlines() if "[1/1]" in line] == ["[1/1] slow …", "[1/1] slow o"]


def test_a_file_receives_heartbeats(monkeypatch):
    monkeypatch.setattr(terminal, "HEARTBEAT_SECONDS", 0.1)
    file = StringIO()
    with ProgressLine(Console(file=file, width=80), "[1/2] a") as line:
        for activity in ("loading", Progress("training", 3, 10, 2.54321)):
            line.update(activity)
            wait_for_line(file, str(activity))
    lines = file.getvalue().splitlines()
    assert re.fullmatch(r"\[1/2\] a loading \(\d s\)", lines[0])
    assert re.fullmatch(r"\[1/2\] a training, step 3/10, 2\.543 s per step \(\d s\)", lines[-1])
    time.sleep(0.3)
    assert file.getvalue().splitlines() == lines, "no heartbeat follows the end"


def wait_for_line(file: StringIO, text: str) -> None:
    deadline = time.monotonic() + 240
    while text not in file.getvalue():
        assert time.monotonic() < deadline, file.getvalue()
        time.sleep(0.02)
