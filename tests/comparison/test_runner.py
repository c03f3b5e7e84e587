"""The runner with a fake trainer: every way a trial can end is named rightly, and harms no other trial."""

import html
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from megabench.doctor.write_findings import findings_at
from megabench.record import RunFailure, RunRecord, read_records
from tests.comparison.compare_process import (
    BASE,
    FAKE,
    compare,
    finish,
    free_port,
    running,
    start,
    torchrun,
    wait_until_gone,
    wait_until_running,
)

pytestmark = pytest.mark.distributed

FAULTS = (
    BASE
    + """
timeout_seconds: 120
trials:
  - {name: first, world_size: 2}
  - {name: killed, world_size: 2, seed: 1, env: {FAULT: kill, FAULT_RANK: 1}}
  - {name: raised, world_size: 2, seed: 2, env: {FAULT: raise, FAULT_RANK: 1}}
  - {name: memory, world_size: 2, seed: 3, env: {FAULT: oom, FAULT_RANK: 1}}
  - {name: exited, world_size: 2, seed: 4, env: {FAULT: exit, FAULT_RANK: 0}}
  - {name: hung, timeout_seconds: 40, world_size: 2, seed: 5, env: {FAULT: hang, FAULT_RANK: 1}}
  - {name: stalled, world_size: 2, seed: 10, env: {FAULT: stall, FAULT_RANK: 1}}
  - {name: shm, world_size: 2, seed: 11, env: {FAULT: shm, FAULT_RANK: 1}}
  - {name: unwritten, world_size: 2, seed: 6, env: {FAULT: no_record}}
  - {name: drifted, world_size: 2, seed: 7, env: {LAST_LOSS: 3.5}}
  - {name: lingered, timeout_seconds: 20, world_size: 2, seed: 9, env: {FAULT: linger}}
  - {name: last, world_size: 2, seed: 8}
"""
)

ENDS = {
    "first": ("ok", None),
    "killed": ("failed", "rank 1 was killed by signal 9 (SIGKILL); on Linux that is often the out-of-memory killer"),
    "raised": ("failed", "rank 1 failed after step 2 of 4: ValueError: the real cause"),
    "memory": ("oom", "rank 1 ran out of memory after step 2 of 4: CUDA out of memory"),
    "exited": ("failed", "rank 0 ended with exit status 3; its last words: the words before the end"),
    "hung": ("timeout", "rank 1 in lost_in_thought (fake_trainer.py"),
    "stalled": (
        "failed",
        "rank 1 failed after step 2 of 4: no progress for 9 s: rank 0 (host) is in recv (x.py:1)",
    ),
    "shm": ("failed", "rank 1 failed after step 2 of 4: OSError: [Errno 28] No space left on device: '/dev/shm/torch'"),
    "unwritten": ("failed", "rank 0 ended with exit status 0 but wrote no record.json"),
    "drifted": ("diverged", "its losses differ from those of first by up to 0.17 of their value"),
    "lingered": ("ok", None),
    "last": ("ok", None),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def records(out: Path) -> dict[str, RunRecord]:
    return {record.trial: record for record in read_records(out / "results.jsonl")}


class Faults:
    """One run of the study of faults, which all tests of its outcome share."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.study = write(folder, FAULTS)
        self.status, self.stdout, self.stderr = compare(self.study, "--out", self.out)
        self.records = records(self.out)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


def test_the_report_names_every_end(faults):
    page = html.unescape((faults.out / "report.html").read_text())
    assert f"report: {faults.out / 'report.html'}" in faults.stdout
    assert "No: drifted did not do the same work" in page and "hung hit its time limit" in page
    assert all(name in page and (error or name) in page for name, (_, error) in ENDS.items())


@pytest.mark.parametrize("trial", ENDS)
def test_each_end_is_named(faults, trial):
    status, error = ENDS[trial]
    record = faults.records[trial]
    assert record.status == status, faults.stdout
    assert record.error == error or (error and error in record.error)
    if status != "ok":
        assert f"{trial} " in faults.stdout and record.error in faults.stdout


CAUSES = {
    "first": None,
    "killed": RunFailure(kind="killed", rank=1),
    "raised": RunFailure(kind="error", rank=1),
    "memory": RunFailure(kind="oom", rank=1),
    "exited": RunFailure(kind="error", rank=0),
    "hung": RunFailure(kind="hang", rank=1),
    "stalled": RunFailure(kind="hang", rank=0),
    "shm": RunFailure(kind="shared-memory", rank=1),
    "unwritten": RunFailure(kind="error", rank=0),
    "drifted": None,
    "lingered": None,
}


@pytest.mark.parametrize("trial", CAUSES)
def test_each_cause_is_in_fields(faults, trial):
    assert faults.records[trial].failure == CAUSES[trial]


def test_a_hang_says_how_far_each_rank_was(faults):
    assert "rank 1 in lost_in_thought (fake_trainer.py" in faults.records["hung"].error
    assert "2 of 4 steps done" in faults.records["hung"].error
    assert "rank 0 in waiting_for_peers (fake_trainer.py" in faults.records["hung"].error
    assert faults.records["hung"].error.startswith("no result after 40 s (timeout_seconds): ")


def test_what_was_measured_is_kept_when_processes_do_not_end(faults):
    (late,) = faults.records["lingered"].warnings
    assert late.startswith("its processes had not ended when all was measured: no result after 20 s (timeout_seconds)")
    assert "ranks 0, 1 in lost_in_thought (fake_trainer.py" in late and faults.records["first"].warnings == []


def test_the_doctor_names_each(faults):
    findings = {finding.trials: finding for finding in findings_at(faults.out)}
    assert "ran out of memory" in findings["memory",].what and "CUDA out of memory" in findings["memory",].evidence
    assert findings["drifted",].change.startswith("do not use the speed of this trial")
    assert "perhaps because the other ranks waited for rank 1" in findings["hung",].what
    without_record = findings["raised", "exited", "unwritten"]
    assert (
        "exited: rank 0 ended with exit status 3" in without_record.evidence and "rank-0.log" in without_record.change
    )
    assert f"megabench doctor {faults.out} for details.\n  untrustworthy: drifted: diverged" in faults.stdout


def test_a_study_with_bad_trials_ends_with_1_and_leaves_no_process(faults):
    assert faults.status == 1
    assert "Traceback" not in faults.stderr
    assert not running(faults.out)


def test_what_a_study_leaves(faults):
    assert list(faults.records) == list(ENDS)
    assert (faults.out / "study.yaml").read_text() == FAULTS
    assert json.loads((faults.out / "environment.json").read_text())["versions"]["python"]
    assert (faults.out / "summary.csv").read_text().count("\n") == 1 + len(ENDS)
    assert all(list((faults.out / "tensorboard" / name).glob("*.hparams")) for name in ENDS)
    assert all((faults.out / "logs" / name / f"rank-{rank}.log").exists() for name in ENDS for rank in (0, 1))


def test_a_failed_record_says_what_was_asked_for_and_measures_nothing(faults):
    record = faults.records["killed"]
    assert (record.layout.dp, record.num_steps, record.device, record.num_hosts) == (2, 4, "cpu", 1)
    command = "FAULT=kill FAULT_RANK=1 torchrun --nproc-per-node 2 -m megabench.train --model llama-tiny"
    assert record.command.startswith(command)
    assert record.tokens_per_second is None and record.losses == [] and record.work_class is None


def test_resume_runs_only_what_has_no_good_record(tmp_path):
    study = write(tmp_path, BASE + "trials: [{name: a}, {name: b, seed: 1, env: {FAULT: exit}}, {name: c, seed: 2}]")
    out = tmp_path / "out"
    status, stdout, _ = compare(study, "--out", out, "--nproc", 1, "--only", "a", "--only", "b*")
    assert status == 1 and "[2/2] b failed" in stdout
    assert list(records(out)) == ["a", "b"]
    pid = (out / "logs/a/pid-0").read_text()

    status, stdout, _ = compare(study, "--out", out, "--nproc", 1, "--resume")
    assert status == 1 and "[1/2] b failed" in stdout and "[2/2] c ok" in stdout
    assert list(records(out)) == ["a", "b", "c"]
    assert (out / "logs/a/pid-0").read_text() == pid

    status, stdout, _ = compare(study, "--out", out, "--nproc", 1, "--resume", "--only", "a")
    assert status == 0 and "[1/" not in stdout and "| a " in stdout

    status, stdout, stderr = compare(study, "--out", out, "--nproc", 1)
    assert (status, stdout) == (2, "") and "--resume" in stderr


def test_repeats_and_environment(tmp_path):
    study = write(tmp_path, BASE + "repeats: 2\ntrials: [{name: a, env: {FAULT: environment, MINE: 7 of mine}}]")
    out = tmp_path / "out"
    status, stdout, stderr = compare(study, "--out", out, "--nproc", 2, TORCHELASTIC_RUN_ID="x", GROUP_RANK="0")
    assert status == 0, stdout + stderr
    found = read_records(out / "results.jsonl")
    assert [record.repeat for record in found] == [0, 1]
    assert found[0].command.startswith(
        "FAULT=environment MINE='7 of mine' torchrun --nproc-per-node 2 -m megabench.train "
    )
    prefixes = set()
    for folder in ("a", "a/repeat-1"):
        lines = (out / "logs" / folder / "environment-1").read_text().splitlines()
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        assert not {name for name in variables if name.startswith(("TORCHELASTIC", "GROUP_"))}
        assert [variables[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == list("1122")
        names = ("MINE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
        assert [variables[name] for name in names] == ["7 of mine", "1", ""]
        prefixes.add(variables["MEGABENCH_STORE_PREFIX"])
    assert len(prefixes) == 2


def test_repeats_are_interleaved_and_resume_runs_only_the_missing_ones(tmp_path):
    study = write(tmp_path, BASE + "trials: [{name: a, repeats: 2}, {name: b, seed: 1}]")
    out = tmp_path / "out"
    status, stdout, stderr = compare(study, "--out", out, "--nproc", 1)
    assert status == 0, stdout + stderr
    kept = {path: path.read_text() for path in out.glob("logs/**/pid-0")}
    assert {path.parent.relative_to(out).as_posix() for path in kept} == {"logs/a", "logs/b", "logs/a/repeat-1"}

    status, stdout, stderr = compare(study, "--out", out, "--nproc", 1, "--resume", "--repeats", 3)
    assert status == 0, stdout + stderr
    starts = re.findall(r"^\[(\d)/3\] (\S+) …$", stdout, re.M)
    assert starts == [("1", "b/repeat-1"), ("2", "a/repeat-2"), ("3", "b/repeat-2")]
    assert all(path.read_text() == text for path, text in kept.items()), "the earlier runs stay as they are"
    found = [(record.trial, record.repeat) for record in read_records(out / "results.jsonl")]
    assert found == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert {path.parent.name for path in (out / "tensorboard").rglob("*.hparams")} == {"a", "b", "repeat-1", "repeat-2"}

    status, stdout, stderr = compare(study, "--out", out, "--nproc", 1, "--resume")
    assert status == 0 and " …\n" not in stdout, "a smaller number of repeats runs nothing and drops nothing"
    assert len(read_records(out / "results.jsonl")) == 6 and not (out / "results-of-others.jsonl").exists()


def test_a_first_run_that_runs_again_keeps_the_logs_of_its_repeats(tmp_path):
    study = write(tmp_path, BASE + "repeats: 2\ntrials: [{name: a}]")
    out = tmp_path / "out"
    assert compare(study, "--out", out, "--nproc", 1)[0] == 0
    lines = (out / "results.jsonl").read_text().splitlines()
    (out / "results.jsonl").write_text(lines[1] + "\n")
    pid, second = (out / "logs/a/pid-0").read_text(), (out / "logs/a/repeat-1/pid-0").read_text()
    status, stdout, _ = compare(study, "--out", out, "--nproc", 1, "--resume")
    assert status == 0 and "[1/1] a ok" in stdout
    assert (out / "logs/a/pid-0").read_text() != pid and (out / "logs/a/repeat-1/pid-0").read_text() == second


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_supervisor_ends_all_that_its_children_started(tmp_path, sent, status):
    study = write(tmp_path, BASE + "trials: [{name: a, env: {FAULT: grandchild}}]")
    out = tmp_path / "out"
    process = start(FAKE, study, "--out", out, "--nproc", 2)
    wait_until_running(out, {f"logs/a/pid-{who}" for who in ("0", "1", "grandchild-0", "grandchild-1")})
    process.send_signal(sent)
    code, _, stderr = finish(process, 60)
    assert code == status
    assert stderr == f"Stopped: stopped by {sent.name}. Run the same command with --resume to continue.\n"
    assert not running(out)


def test_a_daemon_does_not_survive_its_trial(tmp_path):
    study = write(tmp_path, BASE + "trials: [{name: a, env: {FAULT: daemon}}]")
    out = tmp_path / "out"
    assert compare(study, "--out", out, "--nproc", 2)[0] == 0
    assert len([*out.glob("logs/a/pid-daemon-*")]) == 2 and not running(out)


FULL = """
trials:
  - {name: a, world_size: 1}
  - {name: b, world_size: 1, seed: 1, env: {FAULT: full}}
  - {name: c, world_size: 1, seed: 2LAST}
"""


@pytest.mark.parametrize("freed", [True, False])
def test_a_full_disk_loses_no_later_trial(tmp_path, freed):
    study = write(tmp_path, BASE + FULL.replace("LAST", ", env: {FAULT: freed}" * freed))
    out = tmp_path / "out"
    status, stdout, stderr = compare(study, "--out", out)
    names = [record.trial for record in read_records(out / "results.jsonl")]
    assert "Traceback" not in stdout + stderr
    if freed:
        assert (status, names) == (0, ["a", "b", "c"]), stderr
    else:
        assert (status, names) == (1, ["a"])
        assert stderr.startswith(f"Error: the results in {out} could not be written: Is a directory; free space")


def test_a_process_that_cannot_start_fails_its_trial_alone(tmp_path):
    """Each variable is short enough, but all together exceed what a process may receive."""
    many = ", ".join(f"V{number}: {'x' * 120_000}" for number in range(8))
    study = write(tmp_path, BASE + f"trials: [{{name: a, env: {{{many}}}}}, {{name: b, seed: 1}}]")
    out = tmp_path / "out"
    padding: dict[str, Any] = {f"P{number}": "x" * 120_000 for number in range(11)}
    status, stdout, stderr = compare(study, "--out", out, "--nproc", 2, **padding)
    found = {record.trial: record for record in read_records(out / "results.jsonl")}
    assert status == 1 and found["b"].status == "ok", stdout + stderr
    assert found["a"].status == "failed" and "cannot start the process: " in (found["a"].error or "")


def test_children_die_with_a_killed_supervisor(tmp_path):
    study = write(tmp_path, BASE + "trials: [{name: a, env: {FAULT: kill, FAULT_RANK: 9}}]")
    out = tmp_path / "out"
    process = start(FAKE, study, "--out", out, "--nproc", 2)
    wait_until_running(out, {"logs/a/pid-0", "logs/a/pid-1"})
    process.kill()
    finish(process)
    wait_until_gone(out)


def test_two_agents_share_a_study(tmp_path):
    study = write(
        tmp_path,
        BASE
        + """
trials:
  - {name: killed, env: {FAULT: kill, FAULT_RANK: 3}}
  - {name: two, seed: 2, world_size: 2}
  - {name: all, seed: 3}
""",
    )
    out = tmp_path / "out"
    command = torchrun(2, 2, study, "--out", out)
    agents = [start(command), start(command)]
    ends = [finish(agent) for agent in agents]
    assert [status for status, _, _ in ends] == [1, 1], ends
    found = records(out)
    assert {name: record.status for name, record in found.items()} == {"killed": "failed", "two": "ok", "all": "ok"}
    assert found["killed"].error.startswith("rank 3 was killed by signal 9")
    assert sum(stdout.count("tok/s per process") for _, stdout, _ in ends) == 1
    assert not running(out)


def test_a_study_that_cannot_run_is_refused_once_by_all_ranks(tmp_path):
    study = write(tmp_path, BASE + "trials: [{tp: 3}]")
    status, _, stderr = compare(command=torchrun(1, 2, study, "--out", tmp_path / "out"))
    assert status == 1  # torchrun's own, for workers that ended with 2
    assert f"\n{stderr}".count("\nError: ") == 1 and stderr.count("trial 1 (tp=3): tp=3") == 1
    assert "exitcode  : 2" in stderr and "exitcode  : -" not in stderr
    assert not (tmp_path / "out").exists()


def test_hosts_with_different_study_files_are_told(tmp_path):
    (tmp_path / "other").mkdir()
    texts = [BASE + "trials: [{seed: 1}]", BASE + "trials: [{seed: 2}]"]
    studies = [write(tmp_path, texts[0]), write(tmp_path / "other", texts[1])]
    ranks = launched(studies, tmp_path / "out")
    ends = [finish(rank) for rank in ranks]
    assert [status for status, _, _ in ends] == [2, 2]
    assert "the study differs between" in ends[0][2] and ends[1][2] == ""


@pytest.mark.parametrize("dead", [0, 1])
def test_a_lost_supervisor_ends_the_study(tmp_path, dead):
    study = write(tmp_path, BASE + "trials: [{name: a, env: {FAULT: kill, FAULT_RANK: 9}}]")
    out = tmp_path / "out"
    ranks = launched([study, study], out)
    wait_until_running(out, {"logs/a/pid-0", "logs/a/pid-1"})
    ranks[dead].kill()
    status, _, stderr = finish(ranks[1 - dead], 60)
    finish(ranks[dead])
    assert status == 1 and "Stopped: the s" in stderr and "Traceback" not in stderr
    wait_until_gone(out)
    if dead == 1:
        error = records(out)["a"].error
        assert error.startswith("the supervisor of rank 1 has been silent for") and error in stderr


def launched(studies: list[Path], out: Path) -> list:
    """One supervisor a study file, by a launcher that leaves the store to rank 0."""
    place = {"WORLD_SIZE": str(len(studies)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    local = {"LOCAL_WORLD_SIZE": str(len(studies))}
    return [
        start(FAKE, study, "--out", out, **place, **local, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank, study in enumerate(studies)
    ]


def test_results_of_other_trials_are_not_lost(tmp_path):
    study = write(tmp_path, BASE + "trials: [{world_size: 2}]")
    out = tmp_path / "out"
    assert compare(study, "--out", out)[0] == 0
    before = (out / "results.jsonl").read_bytes()
    for again in ("--resume", "--only=*"):
        status, _, stderr = compare(study, "--out", out, again, "--set", "seq_length=16")
        assert status == 2 and "contains only results of other trials, which would be lost" in stderr
    assert (out / "results.jsonl").read_bytes() == before


def test_results_of_a_removed_trial_are_put_aside_once(tmp_path):
    trials = "trials: [{name: a, world_size: 2}%s]"
    out = tmp_path / "out"
    assert compare(write(tmp_path, BASE + trials % ", {name: b, world_size: 2, seq_length: 32}"), "--out", out)[0] == 0
    for told in (True, False):
        status, stdout, _ = compare(write(tmp_path, BASE + trials % ""), "--out", out, "--resume")
        assert status == 0 and ("put aside" in stdout) == told
    assert list(records(out)) == ["a"] and len(read_records(out / "results-of-others.jsonl")) == 1
    assert "b" not in (out / "summary.csv").read_text().split(",")


def test_results_of_a_changed_trial_are_put_aside(tmp_path):
    trials = "trials: [{name: a, world_size: 2}, {name: b, world_size: 2, seq_length: 32%s}]"
    out = tmp_path / "out"
    assert compare(write(tmp_path, BASE + trials % ""), "--out", out)[0] == 0
    before = records(out)
    status, stdout, _ = compare(write(tmp_path, BASE + trials % ", clip_grad: 0.5"), "--out", out, "--resume")
    aside = out / "results-of-others.jsonl"
    assert status == 0 and f"put aside in {aside}: b" in stdout
    assert [record.trial_id for record in read_records(aside)] == [before["b"].trial_id]
    assert records(out)["a"] == before["a"] and records(out)["b"].trial_id != before["b"].trial_id


def test_records_and_reports_contain_no_secrets(tmp_path):
    study = write(tmp_path, BASE + "trials: [{world_size: 1, env: {WANDB_API_KEY: hunter2, FOO: shown}}]\n")
    out = tmp_path / "out"
    assert compare(study, "--out", out)[0] == 0
    for name in ("results.jsonl", "report.html", "summary.csv", "environment.json"):
        assert "hunter2" not in (out / name).read_text(), name
    (record,) = records(out).values()
    assert record.command.startswith('WANDB_API_KEY="$WANDB_API_KEY" FOO=shown torchrun')
