"""The export from records writes what training wrote."""

import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megabench.comparison.tensorboard_export import check_output, export_records, scalars_of
from megabench.errors import UserError
from megabench.record import RunRecord, read_records
from tests.study.records import make_record
from tests.train.test_pretrain import ROOT, pretrain


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.e2e
def test_a_run_s_record_holds_all_that_training_wrote(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert pretrain("--steps", "6", "--warmup-steps", "2", "--data", "synthetic", "--out", str(out)).returncode == 0
    assert export_records([RunRecord.read(out / "record.json")], tmp_path / "exported") == 1
    written, exported = scalars_in(out / "tensorboard"), scalars_in(tmp_path / "exported" / "run")
    assert written.keys() == {tag for tag in exported if not tag.startswith("trial/")}
    assert [step for step, _ in written["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in written["throughput/step_seconds"]] == [3, 4, 5, 6]
    for tag, points in written.items():
        assert exported[tag] == [(step, pytest.approx(value, rel=1e-5)) for step, value in points], tag


def test_memory_and_utilization_of_gpus() -> None:
    fields: dict[str, Any] = {"device": "NVIDIA H200", "warmup_steps": 1, "peak_memory_gib_by_step": [1.0, 2.0]}
    record = make_record([6.0, 5.0], gpu_utilization_by_step=[None, 0.5], learning_rates=[0.1, 0.2], **fields)
    (_, first), (_, second) = scalars_of(record)
    assert (first["usage/peak_reserved_gib"], first["usage/gpu_utilization"]) == (1.0, None)
    assert (second["usage/peak_reserved_gib"], second["usage/gpu_utilization"]) == (2.0, 0.5)
    assert "throughput/step_seconds" not in first and second["train/learning_rate"] == 0.2


def test_learning_rates_that_a_record_lacks_follow_from_its_schedule() -> None:
    record = read_records(ROOT / "benchmarks" / "llama3-8b-fp8" / "results.jsonl")[0]
    without = record.model_copy(update={"learning_rates": None})
    rates = [values["train/learning_rate"] for _, values in scalars_of(without)]
    assert record.learning_rates == pytest.approx(rates)


def test_a_record_without_values_by_step_exports_the_others() -> None:
    records = read_records(ROOT / "benchmarks" / "llama3-8b-eight" / "results.jsonl")
    record = next(record for record in records if record.trial == "dp8")
    assert record.learning_rates is None and record.peak_memory_gib_by_step is None
    steps = dict(scalars_of(record))
    assert [values["train/loss"] for values in steps.values()] == record.losses
    assert [values["train/grad_norm"] for values in steps.values()] == record.grad_norms
    last = steps[max(steps)]
    assert record.step_seconds and record.mfu and last["throughput/step_seconds"] == record.step_seconds.all[-1]
    faster = record.step_seconds.median / record.step_seconds.all[-1]
    assert last["throughput/mfu"] == pytest.approx(record.mfu * faster)
    # memory and utilization of the whole run would be single points
    assert last["usage/peak_reserved_gib"] is None and last["usage/gpu_utilization"] is None


def test_a_loss_that_is_not_finite_is_written_as_such() -> None:
    (_, first), _ = scalars_of(make_record([None, 5.0]))
    assert first["train/loss"] is not None and math.isnan(first["train/loss"])


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is a file\. Give a directory"):
        check_output(tmp_path / "file")
    export_records([make_record([6.0])], tmp_path / "out")
    with pytest.raises(UserError, match="already contains event files"):
        check_output(tmp_path / "out")
    with pytest.raises(UserError, match="elsewhere' cannot name a directory"):
        export_records([make_record([6.0], trial="../elsewhere")], tmp_path / "out")
    with pytest.raises(UserError, match="no record contains a step"):
        export_records([make_record([])], tmp_path / "out")
