"""Real runs that are stopped, killed, starved of disk, poisoned and frozen."""

import re
import resource
import shutil
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megabench.checkpoint.directory import RUN_ID_NAME, folder_of, steps_in
from megabench.checkpoint.manifest import FileEntry, Manifest
from megabench.record import RunRecord
from tests.exhaustive import with_representatives
from tests.train.resilience import REPOSITORY, Run, losses

pytestmark = pytest.mark.e2e

FAULTS = f"{REPOSITORY}/tests/faults:{REPOSITORY}"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    out = tmp_path_factory.mktemp("uninterrupted")
    run = Run.start(2, "--tp", 2, "--steps", 16, "--out", out)
    assert run.finish() == 0, run.output
    return losses(out)


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path: Path, uninterrupted: list[float]) -> None:
    save = tmp_path / "checkpoints"
    flags = ("--tp", 2, "--steps", 16, "--save", save, "--load", save, "--out", tmp_path / "out")
    run = Run.start(2, *flags)
    run.wait_for(r"^step +4/")
    run.rank(1).send_signal(signal.SIGUSR1)
    assert run.finish() == 0, run.output
    assert "contains no checkpoint yet: training starts at step 0" in run.output and "stopped by SIGUSR1" in run.output
    (done,) = steps_in(save)
    first = RunRecord.read(tmp_path / "out" / "record.json")
    assert 4 <= done < 16 and first.stopped_by == "SIGUSR1" and first.losses == uninterrupted[:done]
    again = Run.start(2, *flags)
    assert again.finish() == 0, again.output
    second = RunRecord.read(tmp_path / "out" / "record.json")
    assert second.first_step == done + 1 and second.stopped_by is None
    assert second.load is not None and second.load.num_bytes > 0
    assert second.losses == pytest.approx(uninterrupted[done:], rel=1e-5)
    assert steps_in(save) == [16, done]


def test_a_killed_rank_is_started_again_and_goes_on(tmp_path: Path, uninterrupted: list[float]) -> None:
    flags = ("--tp", 2, "--steps", 16, "--save", tmp_path / "checkpoints", "--save-every", 3, "--keep", 2)
    run = Run.start(2, *flags, "--out", tmp_path / "out", torchrun=("--max-restarts", "1"))
    run.wait_for(r"^step +8/")
    run.rank(0).kill()
    assert run.finish() == 0, run.output
    record = RunRecord.read(tmp_path / "out" / "record.json")
    assert record.first_step in (4, 7)
    assert record.losses == pytest.approx(uninterrupted[record.first_step - 1 :], rel=1e-5)
    assert steps_in(tmp_path / "checkpoints") == [16, 15] and not run.alive()


def test_a_restart_does_not_take_over_another_runs_checkpoints(tmp_path: Path) -> None:
    """The first try is refused; that the launcher starts it again does not make the directory its own."""
    save = tmp_path / "checkpoints"
    first = Run.start(1, "--steps", 3, "--save", save, "--save-every", 1)
    assert first.finish() == 0, first.output
    flags = ("--steps", 6, "--save", save, "--save-every", 1, "--keep", 1)
    other = Run.start(1, *flags, torchrun=("--max-restarts", "1"))
    assert other.finish() != 0
    assert "already contains checkpoints, the newest of step 3; add --load" in other.output
    assert "resumed from" not in other.output and steps_in(save) == [3, 2, 1]


def test_without_save_a_signal_ends_a_run_as_ever() -> None:
    run = Run.start(1, "--steps", 400)
    run.wait_for(r"^step +3/")
    run.rank(0).terminate()
    assert run.finish() == 1
    assert "exitcode  : -15" in run.output and not run.alive()


def test_a_save_that_fails_is_an_error_that_is_seen(tmp_path: Path) -> None:
    """Files may not grow beyond 1 MB: every save fails, training does not, and the exit status tells."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        flags = ("--save", tmp_path / "checkpoints", "--save-every", 4, "--steps", 10, "--out", tmp_path / "out")
        run = Run.start(2, *flags)
        assert run.finish() == 1, run.output
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert len(re.findall(r"ERROR: the checkpoint of step \d+ was not saved: ", run.output)) == 3
    assert "File too large; this run has no checkpoint" in run.output and "step 10/10 100%" in run.output
    assert run.output.count("Error: the run's last checkpoint, of step 10, could not be saved") == 1
    record = RunRecord.read(tmp_path / "out" / "record.json")
    assert len(record.losses) == 10 and len(record.warnings) == 3
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [RUN_ID_NAME]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    run = Run.start(2, "--tp", 2, "--steps", 400, "--nan-tolerance", 1, PYTHONPATH=FAULTS, FAULT="nan", FAULT_RANK="1")
    assert run.finish() == 1
    # the weights hold NaN, so that no later step can be better: the run ends before the tolerated step
    assert run.output.count("Error: the loss is nan, which is not finite at step 3 of 400, the 1st in a row") == 1
    assert re.search(r"not updated, but [\d,]+ values of the training state are NaN or infinite: weight", run.output)
    assert "Traceback" not in run.output.split("Error: the loss")[0]


def test_a_step_that_is_tolerated_says_what_became_of_the_weights() -> None:
    """Weights of 1e30 are finite, and the gradients that they lead to are not."""
    fault: dict[str, Any] = {"PYTHONPATH": FAULTS, "FAULT": "huge", "FAULT_RANK": "0"}
    run = Run.start(1, "--steps", 12, "--nan-tolerance", 1, **fault)
    assert run.finish() == 1
    tolerated, rest = run.output.split("WARNING: the gradients are not finite at step ")[1].split("\n", 1)
    assert tolerated.endswith("the weights were not updated, and are finite") and "the 1st in a row" in tolerated
    assert "Error: the gradients are not finite at step " in rest and "the 2nd in a row (nan_tolerance=1)" in rest


@pytest.fixture(scope="module", params=["megatron", "deepspeed"])
def healthy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], Path]:
    """The flags of an engine, and a directory with its checkpoint of step 2."""
    flags = ["--tp", 2] if request.param == "megatron" else ["--engine", "deepspeed", "--zero-stage", 3]
    save = tmp_path_factory.mktemp("healthy") / request.param
    run = Run.start(2, *flags, "--steps", 2, "--save", save)
    assert run.finish() == 0, run.output
    return flags, save


@pytest.mark.parametrize("mode", with_representatives(["sync", "async"], "async"))
def test_weights_that_overflow_are_not_saved(tmp_path: Path, healthy: tuple[list[object], Path], mode: str) -> None:
    """Step 3 leaves nothing but NaN, while its own loss is finite; --keep must not delete step 2 for it."""
    flags, original = healthy
    save = tmp_path / "checkpoints"
    shutil.copytree(original, save)
    saving = ("--save", save, "--load", save, "--save-every", 1, "--keep", 1, "--save-mode", mode)
    fault: dict[str, Any] = {"PYTHONPATH": FAULTS, "FAULT": "overflow", "FAULT_RANK": "0,1", "FAULT_STEP": "1"}
    run = Run.start(2, *flags, "--steps", 12, *saving, **fault)
    assert run.finish() == 1, run.output
    assert steps_in(save) == [2]
    assert re.search(
        r"the checkpoint of step 3 was not saved: [\d,]+ values of the training state are NaN or infinite: ", run.output
    )
    assert "the newest good one of this run is that of step 2" in run.output


def test_a_checkpoint_that_is_not_finite_is_not_loaded(tmp_path: Path, healthy: tuple[list[object], Path]) -> None:
    """It was written by a version that did not check."""
    flags, original = healthy
    save = tmp_path / "checkpoints"
    shutil.copytree(original, save)
    spoil(original, folder_of(save, 3))
    run = Run.start(2, *flags, "--steps", 4, "--load", save)
    assert run.finish() == 0, run.output
    assert (
        f"skipped the checkpoint {folder_of(save, 3)}: rank-00000-00.safetensors: 1 value of the training state is"
        in run.output
    )
    assert f"resumed from {folder_of(save, 2)}" in run.output
    shutil.rmtree(folder_of(save, 2))
    run = Run.start(2, *flags, "--steps", 4, "--load", save)
    assert run.finish() != 0
    assert "contains no valid checkpoint: in step-00000003, rank-00000-00.safetensors: 1 value of" in run.output


def spoil(original: Path, folder: Path) -> None:
    """A copy of the checkpoint in `original` whose first value is NaN, with the right checksums."""
    shutil.copytree(folder_of(original, 2), folder)
    path = folder / "rank-00000-00.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, path)
    manifest = Manifest.read(folder)
    entry = FileEntry(name=path.name, num_bytes=path.stat().st_size, crc32=zlib.crc32(path.read_bytes()))
    files = tuple(entry if file.name == path.name else file for file in manifest.files)
    assert manifest.training
    training = manifest.training.model_copy(update={"step": 3})
    manifest.model_copy(update={"files": files, "training": training}).write(folder)


def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    run = Run.start(2, "--tp", 2, "--steps", 400, "--stall-seconds", 8, PYTHONPATH=FAULTS, FAULT="hang", FAULT_RANK="1")
    assert run.finish() == 1
    assert run.output.count("Error: no progress for") == 1
    assert "rank 1 (" in run.output and "is in lost_in_thought (sitecustomize.py:" in run.output
    assert "after step 2 of 400, and the others wait" in run.output and not run.alive()
