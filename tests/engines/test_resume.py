"""A run that is resumed, under whatever layout, is the run that was not interrupted."""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megabench.checkpoint.directory import RUN_ID_NAME, folder_of, steps_in
from megabench.checkpoint.loading import find_newest_good, read_shards
from megabench.checkpoint.manifest import Manifest
from megabench.config import ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.base import StepResult
from megabench.engines.build import build_engine
from megabench.optim.optimizers import OPTIMIZERS
from megabench.runtime.rendezvous import Rendezvous
from megabench.train.checkpointing import Checkpoints, restore
from megabench.train.resume import Resume, check_belongs
from megabench.train.stopping import StoppedError
from tests import distributed
from tests.engines.cases import cases
from tests.engines.equivalence import resolve
from tests.engines.reference import muon_in_fp32

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3, "eps": 1e-8, "steps": 12, "num_layers": 4}
SMALL = ADAMW | {"num_layers": 1, "seq_length": 16}
ZERO = SMALL | {"engine": "deepspeed"}

GOOD = StepResult(loss=1.0, grad_norm=1.0, num_tokens=1, skipped=False)
BAD = StepResult(loss=math.nan, grad_norm=math.inf, num_tokens=1, skipped=True)

Forget = Literal["nothing", "moments", "count", "spread"]


def whole_run(run: ResolvedConfig) -> list[float]:
    """The losses of steps 1 to 12; step 6 is saved on the way."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    rendezvous = Rendezvous(store, rank, dist.get_world_size(), rank, dist.get_world_size())
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"))
    losses = []
    for step in range(run.steps):
        losses.append(_step(run, engine, source, step))
        checkpoints.observe(step + 1, GOOD, is_wrong=False)
        checkpoints.poll()
        if due_step := checkpoints.due_step(step + 1, is_last=step + 1 == run.steps):
            checkpoints.save(due_step)
    assert checkpoints.close() is None
    assert [save.step for save in checkpoints.times] == [6, 12]
    return losses


def resumed_run(run: ResolvedConfig, forget: Forget = "nothing") -> list[float]:
    """The losses of steps 7 to 12, by an engine that starts from the checkpoint; `forget` breaks that on purpose."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    assert run.load is not None
    found = find_newest_good(run.load, store, rank, dist.get_world_size(), "test")
    assert found is not None
    training = check_belongs(found.folder, found.manifest, run, source)
    if forget == "nothing":
        restore(engine, found, torch.device("cpu"))
    else:
        shards = engine.training_state().shards
        kept = [shard for shard in shards if forget != "moments" or shard.kind == "weight"]
        read_shards(found.folder, found.manifest, kept)
        if forget != "spread":
            engine.restored(0 if forget == "count" else training.optimizer.step, training.optimizer.loss_scale)
    return [_step(run, engine, source, step) for step in range(training.step, run.steps)]


def _step(run: ResolvedConfig, engine: Any, source: Any, step: int) -> float:
    dp_rank = run.layout.coordinates(dist.get_rank()).dp
    with muon_in_fp32(run):
        loss: float = engine.train_step(micro_batches(source, run, dp_rank, step), run.lr).loss
    return loss


def save_at_six(directory: Path, world_size: int, **fields: Any) -> list[float]:
    """The losses of the uninterrupted run; what it saved behind step 12 is taken away again."""
    run = resolve(world_size, save=directory, save_every=6, **fields)
    losses = distributed.run(whole_run, world_size, run)[0]
    folder_of(directory, 12).rename(directory / "later")
    return losses


def difference(directory: Path, losses: Sequence[float], world_size: int, *forget: Forget, **fields: Any) -> float:
    run = resolve(world_size, load=directory, **fields)
    resumed = distributed.run(resumed_run, world_size, run, *forget)
    assert all(found == resumed[0] for found in resumed), "ranks report different losses"
    assert len(resumed[0]) == 6
    return max(abs(ours - theirs) / theirs for ours, theirs in zip(resumed[0], losses[6:], strict=True))


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Saved under TP2 · PP2 with a vocabulary that has to be padded, beside training."""
    directory = tmp_path_factory.mktemp("megatron")
    fields = ADAMW | {"tp": 2, "pp": 2, "model": "llama-odd", "save_mode": "async"}
    return directory, save_at_six(directory, 4, **fields)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp4": (4, {"tp": 4}),
    "pp4": (4, {"pp": 4}),
    "pp2-vp2": (2, {"pp": 2, "vp": 2}),
    "dp4": (4, {}),
    "tp2-dp2": (4, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp1": (1, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron(megatron: tuple[Path, list[float]], layout: str) -> None:
    world_size, sizes = LAYOUTS[layout]
    directory, losses = megatron
    assert difference(directory, losses, world_size, **ADAMW, model="llama-odd", **sizes) < TOLERANCE


@pytest.mark.parametrize("forget", ["moments", "count", "spread"])
def test_what_is_forgotten_shows(megatron: tuple[Path, list[float]], forget: Forget) -> None:
    assert difference(*megatron, 4, forget, **ADAMW, model="llama-odd", tp=2) > 10 * TOLERANCE


def test_megatron_bf16_keeps_its_masters(tmp_path: Path) -> None:
    losses = save_at_six(tmp_path, 2, **SMALL, tp=2, precision="bf16")
    assert difference(tmp_path, losses, 2, **SMALL, tp=2, precision="bf16") == 0


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_zero(tmp_path: Path, zero_stage: int) -> None:
    losses = save_at_six(tmp_path, 2, **ZERO, zero_stage=zero_stage)
    assert difference(tmp_path, losses, 4, **ZERO, zero_stage=zero_stage) < TOLERANCE
    if zero_stage in (1, 3):
        assert difference(tmp_path, losses, 2, **ZERO, zero_stage=zero_stage) == 0
        assert difference(tmp_path, losses, 1, **ZERO, zero_stage=4 - zero_stage) < TOLERANCE
        assert difference(tmp_path, losses, 2, "moments", **ZERO, zero_stage=zero_stage) > 10 * TOLERANCE


@pytest.mark.parametrize("fields", cases("RESUMED").values(), ids=str)
def test_on_fewer_ranks(tmp_path: Path, fields: dict[str, Any]) -> None:
    losses = save_at_six(tmp_path, 4, **SMALL, **fields)
    assert difference(tmp_path, losses, 2, **SMALL, **fields) < TOLERANCE
    assert difference(tmp_path, losses, 2, "moments", **SMALL, **fields) > 10 * TOLERANCE


WHOLE_MATRICES = [
    SMALL | fields | {"optimizer": name, "lr": 1e-2}
    for name, optimizer in OPTIMIZERS.items()
    for fields in cases("WHOLE_MATRICES").values()
    if optimizer.needs_matrices
]
KINDS = {
    "adafactor": {"weight", "row_var", "col_var", "variance"},
    "muon": {"weight", "momentum_buffer", "exp_avg", "exp_avg_sq"},
}


@pytest.mark.parametrize("fields", [fields for fields in WHOLE_MATRICES if resolve(1, **fields).can_be_saved], ids=str)
def test_optimizers_of_whole_matrices(tmp_path: Path, fields: dict[str, Any]) -> None:
    losses = save_at_six(tmp_path, 2, **fields)
    assert Manifest.read(folder_of(tmp_path, 6)).num_elements.keys() == KINDS[fields["optimizer"]]
    assert difference(tmp_path, losses, 1, **fields) < TOLERANCE
    assert difference(tmp_path, losses, 2, "moments", **fields) > 10 * TOLERANCE


@pytest.mark.parametrize("fields", [{"zero_stage": 2, "offload": "optimizer"}, {"offload": "all"}, {"hpz_size": 1}])
def test_zero_with_options(tmp_path: Path, fields: dict[str, Any]) -> None:
    losses = save_at_six(tmp_path, 2, **ZERO, **fields)
    assert difference(tmp_path, losses, 2, **ZERO, **fields) == 0


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_zero_in_bf16_keeps_its_masters(tmp_path: Path, zero_stage: int) -> None:
    losses = save_at_six(tmp_path, 2, **ZERO, zero_stage=zero_stage, precision="bf16")
    assert difference(tmp_path, losses, 2, **ZERO, zero_stage=zero_stage, precision="bf16") == 0


@pytest.mark.parametrize("fields", [{"tp": 2}, {"engine": "deepspeed", "zero_stage": 1}])
def test_sgd(tmp_path: Path, fields: dict[str, Any]) -> None:
    sgd = SMALL | {"optimizer": "sgd", "lr": 0.05} | fields
    losses = save_at_six(tmp_path, 2, **sgd)
    assert Manifest.read(folder_of(tmp_path, 6)).num_elements.keys() == {"weight"}
    assert difference(tmp_path, losses, 2, **sgd) == 0


def two_saves(run: ResolvedConfig, deleted: str | None = None) -> list[str | None]:
    """A rank whose files cannot be written: what each of two saves said. `deleted` is deleted between them."""
    from megabench.checkpoint import save as room

    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    rendezvous = Rendezvous(store, rank, 2, rank, 2)
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"))
    checkpoints.save(3)
    assert checkpoints.close() is None  # beside training it would go on
    write = room.write_files

    def full(folder: Path, stem: str, tensors: Any) -> Any:
        write(folder, stem, tensors)
        raise OSError(28, "No space left on device")

    if rank == 1:
        room.write_files = full
        for path in run.save.glob(deleted) if run.save and deleted else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()
    try:
        checkpoints.save(6)
        closing = checkpoints.close()
    finally:
        room.write_files = write
    return [times.error for times in checkpoints.times] + [closing]


@pytest.mark.parametrize("save_mode", ["sync", "async"])
def test_a_save_that_fails_is_said_and_the_older_kept(tmp_path: Path, save_mode: str) -> None:
    run = resolve(2, **SMALL, tp=2, save=tmp_path, keep=1, save_mode=save_mode)
    for good, *told in distributed.run(two_saves, 2, run):
        words = [text for text in told if text]
        assert good is None and words and all("rank 1 (" in text and "No space left" in text for text in words)
        assert "the newest good one of this run is that of step 3" in words[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [RUN_ID_NAME, "step-00000003"]


@pytest.mark.parametrize("deleted", ["step-00000003", "step-00000003/*"])
def test_a_deleted_checkpoint_is_not_named(tmp_path: Path, deleted: str) -> None:
    run = resolve(2, **SMALL, tp=2, save=tmp_path)
    for *_, last in distributed.run(two_saves, 2, run, deleted):
        assert last is not None and last.endswith("No space left on device; this run has no checkpoint")


def progress_reports(run: ResolvedConfig, is_growing: bool) -> int:
    """How often a save reports progress while its file grows after each report, or while it hangs for a second."""
    from megabench.checkpoint import save as room

    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    rendezvous = Rendezvous(dist.distributed_c10d._get_default_store(), 0, 1, 0, 1)
    signs: list[float] = []
    sign = partial(signs.append, 0.0)
    signs_while_writing: list[int] = []
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"), touch=sign)

    def slow(folder: Path, stem: str, tensors: Any) -> Any:
        with (folder / "slow").open("wb", buffering=0) as file:
            for number in range(5):
                file.write(b"x" * is_growing)
                until = time.monotonic() + (60.0 if is_growing else 0.3)
                while len(signs) <= number and time.monotonic() < until:
                    time.sleep(0.01)
        signs_while_writing.append(len(signs))
        return []

    with patch.object(room, "write_files", slow), patch.object(room, "_LOOK_SECONDS", 0.05):
        checkpoints.save(3)
    return signs_while_writing[0]


def test_a_slow_save_is_progress(tmp_path: Path) -> None:
    """Whatever it takes, the watch does not end it; one that hangs it does."""
    run = resolve(1, **SMALL, save=tmp_path)
    assert distributed.run(progress_reports, 1, run, True)[0] >= 5
    assert distributed.run(progress_reports, 1, run, False)[0] == 0


def elements_of_another_rank_twice(run: ResolvedConfig) -> str | None:
    """What is said when replicas are saved as if they were parts."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    rendezvous = Rendezvous(store, rank, 2, rank, 2)
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"))
    state = engine.training_state()
    engine.training_state = lambda: replace(state, shards=[replace(s, is_owner=True) for s in state.shards])  # type: ignore[method-assign]
    checkpoints.save(3)
    return checkpoints.times[0].error


def test_an_element_saved_twice_is_no_checkpoint(tmp_path: Path) -> None:
    run = resolve(2, **SMALL, tp=2, save=tmp_path)
    error = distributed.run(elements_of_another_rank_twice, 2, run)[0]
    assert error is not None and "elements saved instead of" in error
    assert [path.name for path in tmp_path.iterdir()] == [RUN_ID_NAME]


def poisoned_saves(run: ResolvedConfig, kind: str) -> str:
    """A good save of step 3, then one of step 6 after rank 1's state of `kind` was spoiled; why the run must end."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    rendezvous = Rendezvous(store, rank, 2, rank, 2)
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"))
    for step in (3, 6, 9):
        _step(run, engine, source, step)
        if rank == 1 and step == 6:
            shard = next(shard for shard in engine.training_state().shards if shard.kind == kind and shard.is_owner)
            shard.values[:2] = torch.tensor([float("nan"), float("inf")])
        checkpoints.observe(step, GOOD, is_wrong=False)
        assert checkpoints.due_step(step, is_last=False) == step
        try:
            checkpoints.save(step)
        except StoppedError as error:
            assert step == 6, "an asynchronous save, too, ends the run at once"
            return str(error)
    raise AssertionError("the state of step 6 was saved, and that of step 9")


@pytest.mark.parametrize("save_mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["weight", "exp_avg_sq"])
@pytest.mark.parametrize("fields", [{"tp": 2}, {"engine": "deepspeed", "zero_stage": 3}], ids=["megatron", "zero3"])
def test_a_state_that_is_not_finite_is_not_saved(
    tmp_path: Path, fields: dict[str, Any], kind: str, save_mode: str
) -> None:
    """One rank's two values end the run on all ranks; the only healthy checkpoint stays, whatever `keep` says."""
    run = resolve(2, **SMALL | fields, save=tmp_path, save_every=3, keep=1, save_mode=save_mode)
    for sentence in distributed.run(poisoned_saves, 2, run, kind):
        assert (
            f"the checkpoint of step 6 was not saved: 2 values of the training state are NaN or infinite: {kind} model."
            in sentence
        )
        assert sentence.endswith("the newest good one of this run is that of step 3")
    assert sorted(path.name for path in tmp_path.iterdir()) == [RUN_ID_NAME, "step-00000003"]


def saves_by_health(run: ResolvedConfig, healthy: Sequence[bool]) -> list[int]:
    """The steps that are saved when step N is good as `healthy[N - 1]` says, and leaves the weights alone otherwise."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    store = dist.distributed_c10d._get_default_store()
    rendezvous = Rendezvous(store, 0, 1, 0, 1)
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"))
    for step, is_good in enumerate(healthy, 1):
        checkpoints.observe(step, GOOD if is_good else BAD, is_wrong=not is_good)
        if due_step := checkpoints.due_step(step, is_last=step == len(healthy)):
            checkpoints.save(due_step)
    assert checkpoints.close() is None
    return [times.step for times in checkpoints.times if not times.error]


@pytest.mark.parametrize("save_mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("healthy", "saved", "left"),
    [
        ("++++", [2, 4], [4, 2]),
        ("+-++", [3, 4], [4, 3]),  # the save of step 2 is postponed
        ("+++-", [2, 3], [3, 2]),  # no step follows: the state is that of step 3
        ("++--", [2], [2]),
        ("----", [], []),
        ("++-+--", [2, 4], [4, 2]),
    ],
)
def test_only_good_steps_are_saved(
    tmp_path: Path, save_mode: str, healthy: str, saved: list[int], left: list[int]
) -> None:
    """With --keep 1 the checkpoint before the newest stays until a step from the newest was finite."""
    run = resolve(1, **SMALL | {"steps": len(healthy)}, save=tmp_path, save_every=2, keep=1, save_mode=save_mode)
    assert distributed.run(saves_by_health, 1, run, [sign == "+" for sign in healthy])[0] == saved
    assert steps_in(tmp_path) == left


def health_under_fp16(run: ResolvedConfig) -> list[int]:
    """Step 4 is skipped for its loss scale: the state may be saved, and is not known to be healthy."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    rendezvous = Rendezvous(dist.distributed_c10d._get_default_store(), 0, 1, 0, 1)
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"))
    overflow = replace(GOOD, grad_norm=math.inf, skipped=True)
    for step, result in enumerate([GOOD, GOOD, overflow, overflow, overflow, overflow], 1):
        checkpoints.observe(step, result, is_wrong=False)
        if due_step := checkpoints.due_step(step, is_last=False):
            checkpoints.save(due_step)
    assert checkpoints.close() is None
    return steps_in(run.save) if run.save else []


def test_a_skipped_step_of_fp16_proves_no_checkpoint_healthy(tmp_path: Path) -> None:
    run = resolve(1, **SMALL, save=tmp_path, save_every=1, keep=1)
    assert distributed.run(health_under_fp16, 1, run)[0] == [6, 1]


class TakenOver:
    loss = "another run has taken the directory over"


def rollback_after_take_over(run: ResolvedConfig) -> str:
    """Why a run that has lost the lock of its directory does not roll back."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    rendezvous = Rendezvous(dist.distributed_c10d._get_default_store(), 0, 1, 0, 1)
    lock: Any = TakenOver()
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"), lock=lock)
    with pytest.raises(StoppedError) as error:
        checkpoints.find_healthy()
    return str(error.value)


def test_a_rollback_leaves_the_directory_of_another_run_alone(tmp_path: Path) -> None:
    run = resolve(1, **SMALL, save=tmp_path)
    assert distributed.run(rollback_after_take_over, 1, run) == [
        "the run cannot return to a checkpoint: another run has taken the directory over"
    ]


def cannot_delete(run: ResolvedConfig) -> list[str | None]:
    """The errors of saves while the oldest checkpoint cannot be renamed."""
    from pathlib import PosixPath

    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    rendezvous = Rendezvous(dist.distributed_c10d._get_default_store(), 0, 1, 0, 1)
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"))
    rename = PosixPath.rename

    def busy(path: Path, target: Path) -> Path:
        if path.name == "step-00000001":
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    with patch.object(PosixPath, "rename", busy):
        for step in (1, 2, 3, 4):
            checkpoints.observe(step, GOOD, is_wrong=False)
            checkpoints.save(step)
    return [times.error for times in checkpoints.times]


def test_what_cannot_be_deleted_fails_no_save(tmp_path: Path) -> None:
    run = resolve(1, **SMALL, save=tmp_path, keep=1)
    assert distributed.run(cannot_delete, 1, run)[0] == [None] * 4
    assert steps_in(tmp_path) == [4, 3, 1]


@pytest.mark.parametrize("save_mode", ["sync", "async"])
@pytest.mark.parametrize("fields", [{"tp": 2}, {"engine": "deepspeed", "zero_stage": 3}], ids=["megatron", "zero3"])
def test_keep_leaves_checkpoints_behind_links_alone(tmp_path: Path, fields: dict[str, Any], save_mode: str) -> None:
    """Another run's checkpoint, linked into this run's directory, is neither counted nor deleted."""
    fields = SMALL | fields | {"steps": 3, "save_every": 1, "save_mode": save_mode}
    own = tmp_path / "own"
    for directory in (tmp_path / "other", own):
        directory.mkdir()
    distributed.run(saves_of_all_steps, 2, resolve(2, **fields, save=tmp_path / "other"))
    before = sorted(path.name for path in (tmp_path / "other").rglob("*"))
    folder_of(own, 0).symlink_to(folder_of(tmp_path / "other", 3), target_is_directory=True)
    distributed.run(saves_of_all_steps, 2, resolve(2, **fields, save=own, keep=1))
    assert steps_in(own) == [3, 2, 0]
    assert sorted(path.name for path in (tmp_path / "other").rglob("*")) == before


def saves_of_all_steps(run: ResolvedConfig) -> None:
    """Saves every step; all are finite."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    rank, size = dist.get_rank(), dist.get_world_size()
    rendezvous = Rendezvous(dist.distributed_c10d._get_default_store(), rank, size, rank, size)
    checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"))
    for step in range(1, run.steps + 1):
        checkpoints.observe(step, GOOD, is_wrong=False)
        checkpoints.save(step)
    assert checkpoints.close() is None
