"""What a trial or a run leaves to be found is found by short runs, each in fresh processes."""

import re

import pytest

from megabench.record import RunFailure, RunRecord, read_records
from tests.comparison.compare_process import BASE, compare, finish, running, start, torchrun
from tests.comparison.test_runner import records, write

pytestmark = pytest.mark.distributed

# of 8 sequences a replica: micro-batches of 1, 2, 4 and 8
SECONDS = "SECONDS: '1:4.0 2:3.0 4:2.7 8:oom'"


def test_the_fastest_that_fits_is_run_and_the_record_tells_what_was_tried(tmp_path):
    study = write(tmp_path, BASE + f"repeats: 2\ntrials: [{{name: a, micro_batch: auto, env: {{{SECONDS}}}}}]")
    out = tmp_path / "out"
    status, stdout, stderr = compare(study, "--out", out, "--nproc", 2)
    assert status == 0, stdout + stderr
    first, second = read_records(out / "results.jsonl")
    assert first.micro_batch == second.micro_batch == 4
    assert "--micro-batch 4" in first.command and "--steps 4" in first.command
    assert [(p.micro_batch, p.status, p.step_seconds) for p in first.probes] == [
        (1, "ok", 4.0),
        (2, "ok", 3.0),
        (8, "oom", None),
        (4, "ok", 2.7),
    ]
    assert first.probes == second.probes, "the second repeat takes what the first found"
    assert len(list(out.glob("logs/a/**/probes/*"))) == 4
    assert "[1/2] a micro-batch 8, recompute none: oom: rank 0 ran out of memory" in stdout
    assert "[1/2] a chosen: micro-batch 4, recompute none" in stdout
    assert not running(out)


def test_all_supervisors_of_a_launch_take_part(tmp_path):
    study = write(
        tmp_path, BASE + f"trials: [{{name: a, micro_batch: auto, env: {{{SECONDS}}}}}, {{name: b, seed: 2}}]"
    )
    out = tmp_path / "out"
    status, stdout, stderr = compare(command=torchrun(1, 2, study, "--out", out))
    assert status == 0, stdout + stderr
    assert records(out)["a"].micro_batch == 4 and records(out)["b"].status == "ok"


def test_a_trial_that_fits_in_no_way_is_out_of_memory(tmp_path):
    trials = """
trials:
  - {name: large, micro_batch: auto, env: {SECONDS: '1:oom'}}
  - {name: broken, micro_batch: auto, seed: 1, env: {FAULT: exit}}
  - {name: good, seed: 2}
"""
    status, stdout, stderr = compare(write(tmp_path, BASE + trials), "--out", tmp_path / "out", "--nproc", 2)
    found = records(tmp_path / "out")
    assert status == 1 and found["good"].status == "ok", stdout + stderr
    assert (found["large"].status, found["broken"].status) == ("oom", "failed")
    assert found["large"].error.startswith(
        "no setting fits into memory; tried micro-batch 1, recompute none: rank 0 ran out of memory"
    )
    assert found["broken"].error.startswith("micro-batch 1, recompute none: rank 0 ended with exit status 3")
    for name, end in (("large", "oom"), ("broken", "failed")):
        (probe,) = found[name].probes
        assert (probe.micro_batch, probe.status) == (1, end)
        assert "--micro-batch auto" in found[name].command
        assert found[name].auto_settings == ["micro_batch"]
        assert found[name].failure == RunFailure(kind="oom" if end == "oom" else "error", rank=0)


def test_a_run_that_fails_behind_its_probes_tells_what_they_found(tmp_path):
    study = write(
        tmp_path, BASE + f"trials: [{{name: a, micro_batch: auto, env: {{{SECONDS}, FAULT: exit, FAULT_STEPS: 4}}}}]"
    )
    out = tmp_path / "out"
    assert compare(study, "--out", out, "--nproc", 2)[0] == 1
    first = records(out)["a"]
    assert (first.status, first.micro_batch) == ("failed", 4) and "--micro-batch 4" in first.command
    assert [probe.micro_batch for probe in first.probes] == [1, 2, 8, 4]
    status, stdout, _ = compare(study, "--out", out, "--nproc", 2, "--resume")
    assert status == 1 and "chosen" not in stdout, "what was found is not looked for again"
    assert records(out)["a"].probes == first.probes


@pytest.mark.e2e
def test_pretraining_finds_its_micro_batch(tmp_path):
    flags = ("--model", "llama-tiny", "--num-layers", "2", "--seq-length", "32", "--steps", "4", "--global-batch", "4")
    command = torchrun(1, 2, *flags, "--micro-batch", "auto", "--out", tmp_path, script="launch/pretrain.py")
    status, stdout, stderr = finish(start(command, CUDA_VISIBLE_DEVICES=""))
    assert status == 0, stderr
    record = RunRecord.read(tmp_path / "record.json")
    tried = {probe.micro_batch: probe for probe in record.probes}
    assert set(tried) == {1, 2}
    assert record.micro_batch in tried and record.num_steps == 4
    seconds = {size: probe.step_seconds for size, probe in tried.items()}
    assert seconds[record.micro_batch] <= 1.01 * min(seconds.values())
    assert f"--micro-batch {record.micro_batch}" in record.command
    assert re.search(r"^micro-batch 1, recompute none: [\d.]+ s a step of 4 sequences", stdout, re.M), stdout
    assert stdout.count("chosen: ") == 1


def test_a_setting_that_cannot_be_is_told_before_anything_runs(tmp_path):
    trials = "trials: [{tp: 3, micro_batch: auto}]"
    status, stdout, stderr = compare(write(tmp_path, BASE + trials), "--out", tmp_path / "out", "--nproc", 2)
    assert (status, stdout) == (2, "") and "trial 1 (tp=3, micro_batch=auto): tp=3 × cp=1 × pp=1 needs" in stderr
