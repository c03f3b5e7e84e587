"""compare --confirm: which trials run again, when it ends, and what remains for --resume and megabench report."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megabench.record import read_records
from tests.comparison.compare_process import BASE, REPOSITORY, compare, finish, start, torchrun

pytestmark = pytest.mark.distributed


def study_of(folder: Path, answers: str = "fastest", **by_run: str) -> Path:
    """A study of trials whose runs take these seconds a step."""
    trials = "".join(
        f"  - {{name: {name}, seed: {number}, env: {{BY_RUN: '{seconds}'}}}}\n"
        for number, (name, seconds) in enumerate(by_run.items())
    )
    path = folder / "study.yaml"
    path.write_text(f"{BASE}answers: {answers}\nreference: {next(iter(by_run))}\ntrials:\n{trials}")
    return path


def runs(out: Path) -> dict[str, list[int]]:
    """The rounds in which each trial ran."""
    found: dict[str, list[int]] = {}
    for record in read_records(out / "results.jsonl"):
        found.setdefault(record.trial, []).append(record.repeat)
    return found


def started(stdout: str) -> list[str]:
    return re.findall(r"^\[\d+/\d+\] (\S+) …$", stdout, re.M)


# seconds of a step in successive runs: two trials that take turns, and one that is far behind
CLOSE, ALSO_CLOSE = "0.500 0.506 0.500 0.507 0.501", "0.503 0.501 0.507 0.500 0.505"
FAR = "0.700 0.701 0.702"


def test_a_clear_ranking_is_confirmed_by_three_runs_in_rounds(tmp_path):
    study = study_of(tmp_path, zero3="0.600 0.602 0.601", dp="0.500 0.501 0.502", tp=FAR)
    out = tmp_path / "out"
    status, stdout, stderr = compare(study, "--out", out, "--nproc", 2, "--confirm")
    assert status == 0, stdout + stderr
    assert started(stdout) == [
        *("zero3", "dp", "tp"),
        *("zero3/repeat-1", "dp/repeat-1", "tp/repeat-1"),
        *("zero3/repeat-2", "dp/repeat-2", "tp/repeat-2"),
    ]
    assert "--confirm ended: the first place is confirmed\n" in stdout
    assert re.search(r"^dp trains fastest: .* Confirmed by 3 runs of each trial\.$", stdout, re.M)
    assert "Confirmed by 3 runs of each trial." in (out / "report.html").read_text()
    assert "To confirm" not in stdout


def test_the_time_ends_it_and_the_printed_command_continues(tmp_path):
    study = study_of(tmp_path, zero3=FAR, dp=CLOSE, tp=ALSO_CLOSE)
    out = tmp_path / "out"
    status, stdout, stderr = compare(study, "--out", out, "--nproc", 2, "--confirm", "--max-minutes", 0.01)
    assert status == 0, stdout + stderr
    assert runs(out) == {"zero3": [0], "dp": [0], "tp": [0]}
    assert "--confirm ended: the next round (zero3, dp and tp) does not fit into --max-minutes\n" in stdout
    assert re.search(r"^dp trains fastest: .*\. Not confirmed: each trial ran once\.$", stdout, re.M)
    command = f"megabench compare {out}/study.yaml --out {out} --nproc 2 --resume --confirm"
    assert f"\n- To confirm the ranking: {command}\n" in stdout

    status, stdout, stderr = compare(*shlex.split(command)[2:], "--max-minutes", 0.3)
    assert status == 0, stdout + stderr
    assert started(stdout)[:6] == [f"{name}/repeat-{round_}" for round_ in (1, 2) for name in ("zero3", "dp", "tp")]
    found = runs(out)
    assert found["dp"] == found["tp"] == list(range(len(found["dp"]))) and 3 <= len(found["dp"]) < 10
    assert "does not fit into --max-minutes\n" in stdout
    words = (
        r"^(dp and tp|tp and dp) are equal within the 95% interval, .* Not confirmed after \d runs of each trial: the "
    )
    assert re.search(words, stdout, re.M), stdout

    report = [sys.executable, "-m", "megabench", "report", str(out)]
    done = subprocess.run(report, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=True)
    assert re.search(words, done.stdout, re.M) and f"- To confirm the ranking: {command}\n" in done.stdout
    assert runs(out) == found and re.search(r"Not confirmed after \d runs", (out / "report.html").read_text())


def test_equal_trials_are_confirmed_as_equal(tmp_path):
    study = study_of(tmp_path, zero3=FAR, dp="0.5000 0.5001 0.5000", tp="0.5000 0.5000 0.5001")
    status, stdout, stderr = compare(study, "--out", tmp_path / "out", "--nproc", 2, "--confirm")
    assert status == 0, stdout + stderr
    assert len(started(stdout)) == 9 and "--confirm ended: the first place is confirmed\n" in stdout
    assert re.search(
        r"^dp and tp are equal within the 95% interval, .* Confirmed by 3 runs of each trial\.$", stdout, re.M
    )


def test_a_trial_that_fails_in_a_round_is_left_out_and_resumed(tmp_path):
    study = study_of(tmp_path, zero3="0.600 0.601 0.602", dp="0.500 0.501 0.502", tp="0.490 oom")
    out = tmp_path / "out"
    status, stdout, stderr = compare(study, "--out", out, "--nproc", 2, "--confirm")
    assert status == 1, stdout + stderr
    assert runs(out) == {"zero3": [0, 1, 2], "dp": [0, 1, 2], "tp": [0, 1]}
    assert re.search(r"^dp trains fastest: .* Confirmed by 3 runs of each trial\.$", stdout, re.M)
    status, stdout, stderr = compare(study, "--out", out, "--nproc", 2, "--resume")
    assert status == 1 and started(stdout) == ["tp/repeat-1"], "as any other run without a result"


def test_only_the_lead_of_a_launch_chooses_the_rounds(tmp_path):
    study = study_of(tmp_path, zero3=FAR, dp="0.500 0.501 0.502")
    out = tmp_path / "out"
    status, stdout, stderr = finish(start(torchrun(1, 2, study, "--out", out, "--confirm", "--max-minutes", 5)))
    assert status == 0, stdout + stderr
    assert runs(out) == {"zero3": [0, 1, 2], "dp": [0, 1, 2]}
    assert stdout.count("--confirm ended: the first place is confirmed\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-minutes", "5"], "--max-minutes works only with --confirm; add --confirm, or leave out --max-minutes"),
        (["--confirm", "--max-minutes", "0"], "--max-minutes 0.0 must be a positive number of minutes up to 100,000"),
        (["--confirm", "--max-minutes", "nan"], "--max-minutes nan must be a positive number of minutes"),
        (["--repeats", "2", "--set", "repeats=3"], "--repeats 2 and --set repeats=3 both set the repeats; use one"),
        (["--repeats", "0"], "Input should be greater than or equal to 1"),
        (["--repeats", "1001"], "Input should be less than or equal to 1000"),
    ],
)
def test_what_is_refused_before_any_run(tmp_path, options, words):
    out = tmp_path / "out"
    study = study_of(tmp_path, zero3=FAR)
    status, stdout, stderr = compare(study, "--out", out, "--nproc", 2, *options)
    assert (status, stdout) == (2, "") and words in " ".join(stderr.split()) and stderr.count("Error") == 1
    assert not out.exists()


def test_a_launch_refuses_it_once(tmp_path):
    study = study_of(tmp_path, zero3=FAR)
    options = ("--repeats", 2, "--set", "repeats=3")
    status, _, stderr = finish(start(torchrun(1, 2, study, "--out", tmp_path / "out", *options)))
    assert status == 1 and stderr.count("both set the repeats") == 1 and "exitcode  : 2" in stderr
