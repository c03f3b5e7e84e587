"""A save of several ranks: what the others wrote is waited for, read back, and only then do older checkpoints go."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megabench.checkpoint import save as save_module
from megabench.checkpoint.directory import folder_of, set_aside, steps_in
from megabench.checkpoint.files import Named, write_files
from megabench.checkpoint.manifest import FileEntry, Manifest
from megabench.checkpoint.save import Save, Saver
from megabench.checkpoint.shards import StateShard, TrainingState, blocks_of
from megabench.checkpoint.staging import Staging
from megabench.checkpoint.weights_only import open_weights
from megabench.runtime.rendezvous import open_store
from tests.checkpoint.test_damage import CUT, TOKEN, manifest_of

RANKS = 2

Write = Callable[[Path, str, Sequence[Named]], list[FileEntry]]


def shards_of(rank: int, value: float) -> list[StateShard]:
    return [StateShard("weight", blocks_of(CUT, rank * 16, rank * 16 + 16), torch.full((16,), value))]


class Ranks:
    """The Savers of two ranks, each of which saves half of a tensor."""

    def __init__(self, directory: Path, keep: int | None, is_async: bool) -> None:
        self.directory, self.store = directory, open_store()
        self.savers = [
            Saver(
                directory,
                self.store,
                rank,
                RANKS,
                TOKEN,
                claim=None,
                staging=Staging(shards_of(rank, 0.0)) if is_async else None,
                keep=keep,
                assets={"config.json": b"{}"} if rank == 0 else {},
            )
            for rank in range(RANKS)
        ]

    def save(self, step: int, value: float, describe: Callable[[Manifest], Manifest] = lambda made: made) -> list[Save]:
        """Save a tensor whose elements are all `value`. The state changes as soon as an asynchronous save allows it."""
        for rank, saver in enumerate(self.savers):
            saver.last_finite_step = step
            shards = shards_of(rank, value)
            saver.start(
                step,
                TrainingState(shards, optimizer_step=step),
                lambda elements, files: describe(manifest_of(step, files)),
            )
            if saver.staging:
                shards[0].values.fill_(-1.0)
        return [saver.finish(lambda: None) for saver in self.savers]


@pytest.fixture(params=["sync", "async"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Ranks:
    return Ranks(tmp_path, 1, request.param == "async")


def after_writing(monkeypatch: pytest.MonkeyPatch, rank: int, change: Callable[[Path], object]) -> None:
    """Let `change` befall the directory after the rank has written its files, and before the rank reports them."""

    def write(folder: Path, stem: str, tensors: Sequence[Named]) -> list[FileEntry]:
        files = write_files(folder, stem, tensors)
        if stem == f"rank-{rank:05d}":
            change(folder)
        return files

    monkeypatch.setattr(save_module, "write_files", write)


def before_writing(monkeypatch: pytest.MonkeyPatch, rank: int, change: Callable[[Path], object]) -> None:
    def write(folder: Path, stem: str, tensors: Sequence[Named]) -> list[FileEntry]:
        if stem == f"rank-{rank:05d}":
            change(folder)
        return write_files(folder, stem, tensors)

    monkeypatch.setattr(save_module, "write_files", write)


def values_in(folder: Path) -> set[float]:
    """The values in a checkpoint whose checksums are right."""
    return set(open_weights(folder).read(CUT.pieces[0]).flatten().tolist())


def errors(saves: list[Save]) -> set[str | None]:
    return {save.error for save in saves}


@pytest.mark.parametrize("when", [before_writing, after_writing])
@pytest.mark.parametrize("slow_rank", range(RANKS))
def test_a_step_that_is_saved_again_has_the_files_of_its_own_save(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, slow_rank: int, when: Callable[..., None]
) -> None:
    """After a rollback, rank 0 must not take what another rank reported about the earlier save of the step."""
    assert errors(ranks.save(2, 1.0)) == errors(ranks.save(4, 2.0)) == {None}
    for saver in ranks.savers:
        saver.last_finite_step = 2
        saver.verified = {2}
    set_aside(folder_of(ranks.directory, 4), "unhealthy")
    when(monkeypatch, slow_rank, lambda folder: time.sleep(0.3))
    assert errors(ranks.save(4, 3.0)) == {None}
    assert steps_in(ranks.directory) == [4, 2] and values_in(folder_of(ranks.directory, 4)) == {3.0}
    assert values_in(ranks.directory / "step-00000004.unhealthy") == {2.0}


def test_each_save_has_a_directory_of_its_own(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    after_writing(monkeypatch, 0, folders.append)
    for _ in range(3):
        ranks.save(4, 1.0)
        set_aside(folder_of(ranks.directory, 4), "unhealthy")
    assert len(set(folders)) == 3


def flip(folder: Path) -> None:
    path = folder / "rank-00001-00.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 8
    path.write_bytes(content)


def append(folder: Path) -> None:
    with (folder / "rank-00001-00.safetensors").open("ab") as file:
        file.write(b"late")


@pytest.mark.parametrize("damage", [flip, append])
def test_files_that_differ_when_read_back_are_no_checkpoint(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    assert errors(ranks.save(2, 1.0)) == {None}
    after_writing(monkeypatch, 1, damage)
    (error,) = errors(ranks.save(4, 2.0))
    assert error is not None and "rank-00001-00.safetensors has checksum" in error and "was read back" in error
    assert sorted(path.name for path in ranks.directory.iterdir()) == ["step-00000002"]
    monkeypatch.undo()
    assert errors(ranks.save(6, 3.0)) == {None}
    assert steps_in(ranks.directory) == [6, 2] and values_in(folder_of(ranks.directory, 2)) == {1.0}


def test_a_manifest_with_other_checksums_is_no_checkpoint(ranks: Ranks) -> None:
    def change(manifest: Manifest) -> Manifest:
        first, *rest = manifest.files
        return manifest.model_copy(update={"files": (first.model_copy(update={"crc32": first.crc32 ^ 1}), *rest)})

    assert errors(ranks.save(2, 1.0)) == {None}
    (error,) = errors(ranks.save(4, 2.0, change))
    assert error is not None and "when the file was read back" in error
    assert steps_in(ranks.directory) == [2]


def test_files_that_a_rank_lacks_are_no_checkpoint(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    after_writing(monkeypatch, 1, lambda folder: (folder / "rank-00001-00.safetensors").unlink())
    (error,) = errors(ranks.save(2, 1.0))
    assert error is not None and "rank 0 cannot see rank-00001-00.safetensors" in error
    assert not list(ranks.directory.iterdir())


def test_a_checkpoint_of_the_same_name_stays(ranks: Ranks) -> None:
    assert errors(ranks.save(4, 1.0)) == {None}
    (error,) = errors(ranks.save(4, 2.0))
    assert error is not None and "step-00000004 already exists. Move it away." in error
    assert [path.name for path in ranks.directory.iterdir()] == ["step-00000004"]
    assert values_in(folder_of(ranks.directory, 4)) == {1.0}


class Lock:
    loss: str | None = None


def test_a_run_that_lost_its_lock_commits_and_deletes_nothing(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is lost while the files are written; the directory is then another run's, even if the run id is not."""
    lock: Any = Lock()
    ranks.savers[0]._claim = lock
    for step in (2, 4):
        assert errors(ranks.save(step, 1.0)) == {None}
    ranks.savers[0].last_finite_step = 5  # step 2 is therefore due to be deleted
    lock.loss = "another run has the lock"
    after = ranks.save(6, 1.0)
    assert errors(after) == {"another run has the lock"} and all(save.ends_run for save in after)
    assert steps_in(ranks.directory) == [4, 2]


def test_reading_back_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has read its files waits for another rank, and learns that the other one has read a file."""
    monkeypatch.setattr(save_module, "_LOOK_SECONDS", 0.02)
    ranks, read = Ranks(tmp_path, None, False), save_module.check_files
    is_waiting, has_read = threading.Event(), threading.Event()

    def check(folder: Path, files: Sequence[FileEntry], on_part: Callable[[], object]) -> None:
        if any(file.name.startswith("rank-00001") for file in files):  # rank 0 reads this file
            is_waiting.set()
            read(folder, files, on_part)
            has_read.wait(60.0)
        else:
            read(folder, files, on_part)

    monkeypatch.setattr(save_module, "check_files", check)
    for rank, saver in enumerate(ranks.savers):
        state = TrainingState(shards_of(rank, 1.0), optimizer_step=2)
        saver.start(2, state, lambda elements, files: manifest_of(2, files))
    assert is_waiting.wait(60.0)
    touches: list[float] = []

    def touch() -> None:
        touches.append(time.monotonic())
        if ranks.savers[1]._num_parts_read() == 3:
            has_read.set()

    saves = [saver.finish(touch) for saver in reversed(ranks.savers)]
    assert errors(saves) == {None} and has_read.is_set() and touches
