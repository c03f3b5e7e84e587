"""Rollbacks: a run returns to its newest healthy checkpoint, skips the batches in between, and so after a restart."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from megabench.checkpoint.directory import folder_of, steps_in
from megabench.checkpoint.manifest import DataEntry, Manifest, OptimizerEntry, TrainingEntry
from megabench.config import RunConfig
from megabench.config.run_config import ConfigError
from megabench.engines.base import StepResult
from megabench.record import Rollback, RunRecord
from megabench.train.nan_guard import NanGuard
from megabench.train.resume import ROLLBACKS_NAME, batch_of_step, read_rollbacks, write_rollbacks
from tests.chaos.rollbacks import Findings, Plan, roll_back
from tests.exhaustive import with_representatives
from tests.train.resilience import REPOSITORY, Run, losses

FAULTS = f"{REPOSITORY}/tests/faults:{REPOSITORY}"
LAYOUTS: dict[str, list[object]] = {
    "tp2": ["--tp", 2],
    "pp2": ["--pp", 2],
    "dp2": [],
    "zero1": ["--engine", "deepspeed", "--zero-stage", 1],
    "zero2": ["--engine", "deepspeed", "--zero-stage", 2],
    "zero3": ["--engine", "deepspeed", "--zero-stage", 3],
    "fsdp": ["--engine", "fsdp"],
    "ddp": ["--engine", "ddp"],
}
ROLLBACK = ["--steps", 9, "--on-nan", "rollback", "--save-every", 2]


def made(step: int, restored_step: int, next_batch: int) -> Rollback:
    return Rollback(step=step, restored_step=restored_step, next_batch=next_batch, problem="a test")


def training(**fields: object) -> TrainingEntry:
    entry: dict[str, Any] = {
        "run_id": "a" * 12,
        "step": 2,
        "engine": "megatron",
        "layout": {},
        "world_size": 1,
        "optimizer": OptimizerEntry(name="adamw", step=2),
        "data": DataEntry(name="synthetic", sha256="0", next_sequence=0),
        "config": {},
    }
    return TrainingEntry(**entry | fields)


@pytest.mark.parametrize(
    ("rollbacks", "batches"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([made(4, 2, 4)], [0, 1, 4, 5, 6, 7]),
        ([made(4, 2, 4), made(4, 2, 6)], [0, 1, 6, 7, 8, 9]),
        ([made(3, 1, 3), made(5, 4, 7)], [0, 3, 4, 5, 7, 8]),
        ([made(5, 4, 5), made(5, 2, 6)], [0, 1, 6, 7, 8, 9]),
    ],
    ids=["none", "one", "at the same step", "at a later step", "at an earlier step"],
)
def test_the_batches_of_the_steps(rollbacks, batches):
    assert [batch_of_step(rollbacks, step) for step in range(6)] == batches


def test_the_file_adds_the_rollbacks_after_the_checkpoint(tmp_path):
    assert read_rollbacks(tmp_path, training()) == ()
    first, second = made(4, 2, 4), made(9, 6, 11)
    write_rollbacks(tmp_path, "a" * 12, [first, second])
    assert read_rollbacks(tmp_path, training(rollbacks=(first,))) == (first, second)
    assert read_rollbacks(tmp_path, training(run_id="b" * 12, rollbacks=(first,))) == (first,)
    (tmp_path / ROLLBACKS_NAME).write_text("{")
    assert read_rollbacks(tmp_path, training(rollbacks=(first,))) == (first,)


def guard(**fields: object) -> NanGuard:
    settings = {"model": "llama-tiny", "on_nan": "rollback", "save": Path("x"), "save_every": 1}
    return NanGuard(RunConfig.parse(settings | fields).resolve(1, "cpu"))


def result(loss: float) -> StepResult:
    return StepResult(loss=loss, grad_norm=1.0, num_tokens=1, skipped=False)


def test_a_spike_is_above_a_multiple_of_the_running_median():
    watch = guard(spike_multiple=2.0)
    assert not any(watch.spike(result(loss)) for loss in [9.0, 50.0, *[2.0] * 8])  # too few losses for a median
    assert watch.spike(result(3.9)) is None
    assert "the loss is 4.1, more than spike_multiple=2 times the median 2 of the last 11 losses" in watch.spike(
        result(4.1)
    )
    assert watch.recent_losses[-1] == 3.9
    watch.restart((2.0,) * 9)
    assert watch.spike(result(4.1)) is None and watch.spike(result(4.3)) is not None


def test_spikes_are_ignored_without_rollbacks():
    watch = guard(on_nan="stop", spike_multiple=2.0)
    assert not any(watch.spike(result(loss)) for loss in [*[2.0] * 20, 400.0])


def test_a_rollback_needs_checkpoints():
    with pytest.raises(ConfigError, match="on_nan=rollback needs checkpoints to return to; add --save DIR"):
        RunConfig.parse({"model": "llama-tiny", "on_nan": "rollback"}).resolve(1, "cpu")


@pytest.mark.distributed
@pytest.mark.parametrize("layout", with_representatives(LAYOUTS, "tp2", "zero3", "fsdp"))
def test_a_rollback_equals_a_run_that_never_saw_the_batches(tmp_path, layout):
    """Step 5 poisons the weights: the run returns to step 2, because step 4 has no finite step after it."""
    flags, save = [*LAYOUTS[layout], *ROLLBACK], tmp_path / "checkpoints"
    skipping: dict[str, Any] = {
        "PYTHONPATH": FAULTS,
        "FAULT": "skip",
        "FAULT_RANK": "0,1",
        "FAULT_STEP": "3",
        "FAULT_SKIP": "3",
    }
    other = Run.start(2, *flags, "--save", tmp_path / "other", "--out", tmp_path / "expected", **skipping)
    assert other.finish() == 0, other.output
    poisoned: dict[str, Any] = {"PYTHONPATH": FAULTS, "FAULT": "nan", "FAULT_RANK": "0,1", "FAULT_STEP": "5"}
    run = Run.start(2, *flags, "--save", save, "--out", tmp_path / "out", **poisoned)
    assert run.finish() == 0, run.output
    assert run.output.count("ROLLBACK 1 of at most 3: rolled back from step 5 to the checkpoint of step 2") == 1
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "expected"), abs=1e-6)
    record = RunRecord.read(tmp_path / "out" / "record.json")
    assert [(one.step, one.restored_step, one.next_batch) for one in record.rollbacks] == [(5, 2, 5)]
    assert any("skipped the 3 batches in between" in warning for warning in record.warnings)
    assert (save / "step-00000004.unhealthy").is_dir() and steps_in(save) == [9, 8, 6, 4, 2]
    entry = Manifest.read(folder_of(save, 9)).training
    assert entry and entry.data.next_sequence == 12 * record.global_batch and len(entry.rollbacks) == 1


@pytest.mark.distributed
@pytest.mark.parametrize("mode", with_representatives(["sync", "async"], "async"))
def test_every_checkpoint_is_right_after_rollbacks(tmp_path, mode):
    """Bad batches directly after a saved step, and two in a row, with --keep 1 and a rank that reports late."""
    plan = Plan((2, "--tp 2"), mode, save_every=2, keep=1, bad=frozenset({6, 11, 12}), slow_rank=1, slow_seconds=0.3)
    assert plan.rollbacks() == [(7, 4, 7), (9, 6, 12), (7, 6, 13)]
    findings = Findings()
    roll_back(plan, tmp_path, findings)
    assert not findings.problems and not findings.damaged
    assert findings.num_rollbacks == 3 and findings.num_compared == 2


@pytest.mark.distributed
@pytest.mark.parametrize("layout", with_representatives(["tp2", "zero2"], "tp2"))
def test_a_restarted_run_skips_the_same_batches(tmp_path, layout):
    """The run is killed after the rollback and before the next save, and resumes under another layout."""
    flags, save = [*ROLLBACK, "--save-every", 4, "--steps", 12], tmp_path / "checkpoints"
    skipping: dict[str, Any] = {
        "PYTHONPATH": FAULTS,
        "FAULT": "skip",
        "FAULT_RANK": "0,1",
        "FAULT_STEP": "5",
        "FAULT_SKIP": "3",
    }
    expected = Run.start(
        2, *LAYOUTS[layout], *flags, "--save", tmp_path / "other", "--out", tmp_path / "expected", **skipping
    )
    assert expected.finish() == 0, expected.output
    poisoned: dict[str, Any] = {"PYTHONPATH": FAULTS, "FAULT": "nan", "FAULT_RANK": "0,1", "FAULT_STEP": "7"}
    run = Run.start(2, *LAYOUTS[layout], *flags, "--save", save, **poisoned)
    run.wait_for("ROLLBACK 1 of at most 3: rolled back from step 7 to the checkpoint of step 4")
    run.wait_for(r"^step +5/12")
    run.rank(1).send_signal(signal.SIGKILL)
    assert run.finish() != 0
    assert steps_in(save) == [4]
    other = ["--pp", 2] if layout == "tp2" else ["--engine", "deepspeed", "--zero-stage", 3]
    run = Run.start(2, *other, *flags, "--save", save, "--load", save, "--out", tmp_path / "out")
    assert run.finish() == 0, run.output
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "expected")[4:], abs=1e-5)
    assert len(RunRecord.read(tmp_path / "out" / "record.json").rollbacks) == 1


@pytest.mark.distributed
def test_torchrun_restarts_a_run_after_a_rollback(tmp_path):
    """Batch 7 poisons the weights whenever it is read, and a rank is killed between the rollback and the next save."""
    flags = ["--tp", 2, *ROLLBACK, "--save-every", 4, "--steps", 12, "--save", tmp_path / "save"]
    poisoned: dict[str, Any] = {"PYTHONPATH": FAULTS, "FAULT": "batch", "FAULT_RANK": "0,1", "FAULT_STEP": "7"}
    run = Run.start(2, *flags, "--out", tmp_path / "out", torchrun=("--max-restarts", "1"), **poisoned)
    run.wait_for("ROLLBACK 1 of at most 3: rolled back from step 7 to the checkpoint of step 4")
    run.wait_for(r"^step +5/12")
    run.rank(1).kill()
    assert run.finish() == 0, run.output
    record = RunRecord.read(tmp_path / "out" / "record.json")
    assert [(one.step, one.restored_step, one.next_batch) for one in record.rollbacks] == [(7, 4, 7)]
    assert run.output.count("ROLLBACK") == 1 and record.first_step == 5 and len(record.losses) == 8


@pytest.mark.distributed
def test_at_most_so_many_rollbacks_across_restarts(tmp_path):
    """The weights are poisoned again after the restart, when the only rollback has been used."""
    flags = ["--tp", 2, *ROLLBACK, "--max-rollbacks", 1, "--save", tmp_path]
    poisoned: dict[str, Any] = {"PYTHONPATH": FAULTS, "FAULT": "nan", "FAULT_RANK": "0,1", "FAULT_STEP": "5"}
    run = Run.start(2, *flags, **poisoned)
    run.wait_for(r"^step +6/9")
    run.rank(0).send_signal(signal.SIGKILL)
    run.finish()
    run = Run.start(2, *flags, "--load", tmp_path, **poisoned | {"FAULT_STEP": "3"})
    assert run.finish() == 1
    assert re.search(r"Error: the loss is nan.*; max_rollbacks=1 is reached; the newest healthy checkpoint", run.output)


@pytest.mark.distributed
def test_a_run_without_a_healthy_checkpoint_stops(tmp_path):
    poisoned: dict[str, Any] = {"PYTHONPATH": FAULTS, "FAULT": "nan", "FAULT_RANK": "0,1", "FAULT_STEP": "2"}
    run = Run.start(2, "--tp", 2, *ROLLBACK, "--save", tmp_path, **poisoned)
    assert run.finish() == 1
    assert (
        len(re.findall(r"^Error: .*; there is no healthy checkpoint to roll back to$", run.output, re.MULTILINE)) == 1
    )


@pytest.mark.distributed
@pytest.mark.parametrize("layout", with_representatives(["tp2", "zero1"], "tp2"))
def test_a_loss_spike_is_rolled_back(tmp_path, layout):
    flags = [*LAYOUTS[layout], *ROLLBACK, "--save-every", 5, "--steps", 15, "--spike-multiple", 1.2]
    spiking: dict[str, Any] = {"PYTHONPATH": FAULTS, "FAULT": "spike", "FAULT_RANK": "0,1", "FAULT_STEP": "13"}
    run = Run.start(2, *flags, "--save", tmp_path / "checkpoints", "--out", tmp_path / "out", **spiking)
    assert run.finish() == 0, run.output
    assert "rolled back from step 13 to the checkpoint of step 10, and skipped the 3 batches in between" in run.output
    assert "more than spike_multiple=1.2 times the median" in run.output
    assert len(losses(tmp_path / "out")) == 15
