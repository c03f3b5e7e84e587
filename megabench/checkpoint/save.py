"""Saving of checkpoints: each rank writes its own shards, and rank 0 completes the checkpoint when all ranks are done.

A background thread of each rank saves while training continues. The ranks coordinate a save only through the rendezvous
store, without collectives. A failed save is reported: the save does not stop the run and does not affect older
checkpoints.
"""

import json
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

from torch.distributed import Store

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.directory import bytes_in, commit, folder_of, make_way, partial_folder, prune
from megabench.checkpoint.files import Named, write_assets, write_files
from megabench.checkpoint.health import count_non_finite, describe_non_finite
from megabench.checkpoint.manifest import FileEntry, Manifest
from megabench.checkpoint.shards import StateShard, TrainingState, key, num_elements, view
from megabench.checkpoint.staging import Staging
from megabench.runtime.messages import wait_for
from megabench.runtime.rendezvous import reconnect
from megabench.runtime.run_lock import RunLock

_LOOK_SECONDS = 1.0

# function that creates the manifest on rank 0 from the number of elements of each kind and the list of files
Describe = Callable[[dict[str, int], list[FileEntry]], Manifest]


@dataclass(frozen=True)
class Save:
    """The outcome of a save. `seconds` is the duration of the whole save, and `error` is None if the save succeeded.

    `stall_seconds` is the time for which training on this rank waited for the save. `check_seconds` is the part of
    `stall_seconds` spent on the search for non-finite values. `ends_run` is True if no later save can succeed, because
    the state is not finite or another run has taken over the directory. `warning` is the reason why an old checkpoint
    could not be deleted. All fields except `stall_seconds` and `check_seconds` are equal on all ranks.
    """

    step: int
    num_bytes: int
    seconds: float
    stall_seconds: float
    check_seconds: float = 0.0
    error: str | None = None
    ends_run: bool = False
    warning: str | None = None


class Saver:
    """Save the state of a run to a directory that all hosts share, one checkpoint at a time.

    `token` identifies one start of the run. `claim` is the single-writer lock of `directory`, which rank 0 holds. Saves
    are asynchronous if `staging` is set. `keep` is the number of newest checkpoints to keep. `assets` are the files
    that every checkpoint contains besides tensors. The caller sets `last_finite_step` to the newest step with finite
    loss and gradient norm.
    """

    def __init__(
        self,
        directory: Path,
        store: Store,
        rank: int,
        world_size: int,
        token: str,
        claim: RunLock | None,
        staging: Staging | None,
        keep: int | None,
        assets: Mapping[str, bytes],
    ) -> None:
        self.directory, self.keep, self.staging, self.assets = directory, keep, staging, assets
        self._store = reconnect(store)
        self._rank, self._world_size, self._token, self._claim = rank, world_size, token, claim
        self._thread: Thread | None = None
        self._started, self._step = 0.0, 0
        self._stall = self._check = 0.0
        self._warning: str | None = None
        self._non_finite: Counter[str] = Counter()
        self.last_finite_step = 0
        self._outcome: Save | None = None

    def start(self, step: int, state: TrainingState, describe: Describe) -> None:
        """Start saving the current values of `state` after `step` steps. Call `finish` before the next `start`.

        With staging, the method returns after copying the state. Without staging, the caller must not change the state
        before `finish` returns.
        """
        assert self._thread is None
        self._started, self._step = time.perf_counter(), step
        self._non_finite = count_non_finite(state.shards)
        self._check = time.perf_counter() - self._started
        shards = state.shards
        if self.staging and not self._non_finite:
            shards = self.staging.fill(shards)
        self._thread = Thread(target=self._save, args=(step, shards, describe), name=f"save-{step}", daemon=True)
        self._thread.start()
        self._stall = time.perf_counter() - self._started

    @property
    def is_finite(self) -> bool:
        """Whether the state on this rank contained only finite values when the save started."""
        return not self._non_finite

    @property
    def is_saving(self) -> bool:
        """Whether a save has started and `finish` has not been called."""
        return self._thread is not None

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return without waiting."""
        return self._thread is not None and not self._thread.is_alive()

    def finish(self, touch: Callable[[], None]) -> Save:
        """Wait for the current save and return its outcome. Call `touch` whenever the checkpoint has grown."""
        assert self._thread is not None
        waited, size = time.perf_counter(), 0
        while self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if (now := bytes_in(partial_folder(self.directory, self._step, self._token))) > size:
                size = now
                touch()
        self._thread = None
        assert self._outcome is not None
        stall = self._stall + time.perf_counter() - waited
        return replace(self._outcome, stall_seconds=stall, check_seconds=self._check)

    def _save(self, step: int, shards: list[StateShard], describe: Describe) -> None:
        """Write the files of this rank, publish a report in the store, and wait for the outcome from rank 0."""
        topic = f"save/{self._token}/{step}"
        try:
            if self._rank == 0:
                self._prune()  # later steps may have shown that the last checkpoint is healthy
            self._store.set(f"{topic}/{self._rank}", json.dumps(self._write(step, shards)))
            if self._rank == 0:
                self._store.set(f"{topic}/outcome", json.dumps(self._conclude(step, topic, describe)))
            wait_for(self._store, [f"{topic}/outcome"])
            self._outcome = Save(**json.loads(self._store.get(f"{topic}/outcome")))
        except Exception as error:  # the rendezvous store is lost, which means that the run has ended
            self._outcome = Save(step, 0, 0.0, 0.0, error=f"{_here(self._rank)}: {_words(error)}")

    def _write(self, step: int, shards: list[StateShard]) -> dict[str, object]:
        if self._non_finite:
            return {"non_finite": self._non_finite}
        folder = partial_folder(self.directory, step, self._token)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            named = tensors_of(shards)
            files = write_files(folder, f"rank-{self._rank:05d}", named)
            if self._rank == 0:
                files += write_assets(folder, self.assets)
            elements: Counter[str] = Counter()
            for shard in shards:
                if shard.is_owner:
                    elements[shard.kind] += sum(num_elements(block.piece) for block in shard.blocks)
            return {"files": [file.model_dump() for file in files], "elements": elements}
        except Exception as error:
            return {"error": f"{_here(self._rank)}: {_words(error)}"}

    def _conclude(self, step: int, topic: str, describe: Describe) -> dict[str, object]:
        """Wait on rank 0 for the reports of all ranks. Complete the checkpoint, or delete its files after an error."""
        keys = [f"{topic}/{rank}" for rank in range(self._world_size)]
        wait_for(self._store, keys)
        reports = [json.loads(self._store.get(key)) for key in keys]
        partial = partial_folder(self.directory, step, self._token)
        loss = self._claim.loss if self._claim else None
        non_finite: Counter[str] = Counter()
        for report in reports:
            non_finite.update(report.get("non_finite", {}))
        # report the lost directory lock first: another run may have deleted files of this save
        if loss:
            errors = [loss]
        elif non_finite:
            errors = [describe_non_finite(non_finite)]
        else:
            errors = [report["error"] for report in reports if "error" in report]
        files = [FileEntry(**file) for report in reports for file in report.get("files", ())]
        if not errors:
            try:
                elements = sum((Counter(report["elements"]) for report in reports), Counter())
                self._commit(step, partial, describe(dict(elements), files))
            except Exception as error:
                errors.append(f"{_here(0)}: {_words(error)}")
        if errors:
            shutil.rmtree(partial, ignore_errors=True)
        return {
            "step": step,
            "num_bytes": sum(file.num_bytes for file in files),
            "seconds": time.perf_counter() - self._started,
            "stall_seconds": 0.0,
            "error": errors[0] if errors else None,
            "ends_run": bool(loss or non_finite),
            "warning": self._warning,
        }

    def _commit(self, step: int, partial: Path, manifest: Manifest) -> None:
        for file in manifest.files:
            if not (partial / file.name).exists():
                raise FileNotFoundError(f"rank 0 cannot see {file.name}. Save to a directory that all hosts share.")
        manifest.write(partial)
        final = folder_of(self.directory, step)
        make_way(final, self._token)
        commit(partial, final)
        self._prune()

    def _prune(self) -> None:
        """Delete old checkpoints. A failed deletion causes a warning, but does not make the save fail."""
        self._warning = None
        if self.keep is not None:
            try:
                prune(self.directory, self.keep, self._token, healthy_before=self.last_finite_step)
            except OSError as error:
                self._warning = f"--keep could not delete an old checkpoint: {error}"


def tensors_of(shards: list[StateShard]) -> list[Named]:
    """Return the blocks of all owned shards, each with its name in the tensor files."""
    return [
        (key(shard.kind, block.piece), view(shard.values, block))
        for shard in shards
        if shard.is_owner
        for block in shard.blocks
    ]


def _here(rank: int) -> str:
    return f"rank {rank} ({socket.gethostname()})"


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
