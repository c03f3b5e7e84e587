"""Real training under real faults: one rank raises, is killed or hangs in its third step; the other trials train on."""

import pytest

from megabench.record import RunFailure, read_records
from tests.comparison.compare_process import REPOSITORY, finish, start, torchrun

pytestmark = pytest.mark.e2e

STUDY = """
question: Does a fault stay where it is?
base: {{model: llama-tiny, num_layers: 2, steps: 6, warmup_steps: 2, device: cpu, seq_length: 64}}
timeout_seconds: 240
trials:
  - {{name: before, tp: 2}}
  - {{name: raises, tp: 2, seed: 1, env: {{FAULT: raise, FAULT_RANK: 1, PYTHONPATH: {path}}}}}
  - {{name: killed, tp: 2, seed: 2, env: {{FAULT: kill, FAULT_RANK: 0, PYTHONPATH: {path}}}}}
  - {{name: hangs, timeout_seconds: 60, tp: 2, seed: 3, env: {{FAULT: hang, FAULT_RANK: 1, PYTHONPATH: {path}}}}}
  - {{name: stands, stall_seconds: 8, tp: 2, seed: 4, env: {{FAULT: hang, FAULT_RANK: 1, PYTHONPATH: {path}}}}}
  - {{name: after, pp: 2}}
reference: before
"""


@pytest.mark.timeout(900)
def test_faults_are_named_and_harm_no_other_trial_of_two_agents(tmp_path):
    study, out = tmp_path / "study.yaml", tmp_path / "out"
    study.write_text(STUDY.format(path=f"{REPOSITORY}/tests/faults:{REPOSITORY}"))
    command = torchrun(2, 1, script="launch/compare.py")
    other = start(command, study, "--out", out)
    status, stdout, stderr = finish(start(command, study, "--out", out), seconds=700)
    other_status, other_stdout, other_stderr = finish(other)
    assert other_status == status, "torchrun's own status, on both"
    stdout, stderr = stdout + other_stdout, stderr + other_stderr
    found = {record.trial: record for record in read_records(out / "results.jsonl")}
    assert status == 1
    assert {name: record.status for name, record in found.items()} == {
        "before": "ok",
        "raises": "failed",
        "killed": "failed",
        "hangs": "timeout",
        "stands": "failed",
        "after": "ok",
    }, stdout + stderr
    assert found["raises"].error == "rank 1 failed after step 2 of 6: ValueError: a fault on purpose"
    assert found["killed"].error.startswith("rank 0 was killed by signal 9 (SIGKILL) after step 2 of 6")
    assert "rank 1 in lost_in_thought (sitecustomize.py:" in found["hangs"].error
    assert "rank 0 in " in found["hangs"].error and "2 of 6 steps done" in found["hangs"].error
    assert {name: record.failure for name, record in found.items()} == {
        "before": None,
        "raises": RunFailure(kind="error", rank=1),
        "killed": RunFailure(kind="killed", rank=0),
        "hangs": RunFailure(kind="hang"),  # both ranks have done two steps
        "stands": RunFailure(kind="hang", rank=1),
        "after": None,
    }
    assert found["after"].parity.verdict == "equal" and found["after"].parity.reference == "before"
    assert "Yes: 2 of 6 trials reach the same losses" in stdout
    assert all(found[name].error in stdout for name in ("raises", "killed", "hangs"))
