"""The comparison of tensors in the results of a study, without processes."""

from pathlib import Path

import pytest
import torch

from megabench import sketch
from megabench.comparison.results import Results
from megabench.study.study import StudyFile, plan_study
from tests.study.records import make_record


@pytest.fixture
def results(tmp_path: Path) -> Results:
    base = {"model": "llama-tiny", "device": "cpu", "world_size": 2, "steps": 8}
    file = StudyFile(base=base, trials=[{"name": "zero3", "engine": "deepspeed"}, {"name": "tp2", "tp": 2}])
    source = tmp_path / "study.yaml"
    source.touch()
    opened = Results.open(tmp_path / "out", plan_study(file, source, 2, "cpu"))
    opened.start()
    return opened


def add(results: Results, name: str, factor: float) -> tuple[str, str | None]:
    """Add a run whose gradient is `factor` times the right one. Return its status and error."""
    attempt = next(attempt for attempt in results.attempts if attempt.trial.name == name)
    results.clear(attempt)
    one = sketch.sketch("a.weight", (8,), factor * torch.arange(8.0))
    sketch.write(results.sketches(attempt), {("gradient", 1, "a.weight"): one}, precision="fp32")
    record = results.add(attempt, make_record([6.0, 5.0]))
    return record.status, record.error


def test_a_run_that_ran_again_is_compared_again(results: Results) -> None:
    assert add(results, "zero3", 1.0) == ("ok", None)
    status, error = add(results, "tp2", 2.0)
    assert status == "diverged" and error and "All gradients of step 1 are 2 times those of the other run" in error
    assert add(results, "tp2", 1.0) == ("ok", None)
    assert add(results, "tp2", 2.0)[0] == "diverged"
    add(results, "zero3", 2.0)
    assert [record.status for record in results.records] == ["ok", "ok"], "the reference ran again"


def test_a_damaged_file_is_no_equal_trial(results: Results) -> None:
    add(results, "zero3", 1.0)
    add(results, "tp2", 1.0)
    tp2 = next(attempt for attempt in results.attempts if attempt.trial.name == "tp2")
    results.clear(tp2)
    results.sketches(tp2).write_text("truncated")
    record = results.add(tp2, make_record([6.0, 5.0]))
    assert record.status == "diverged" and record.error and "is not a file of sketches" in record.error
