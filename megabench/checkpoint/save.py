"""Saving of checkpoints: each rank writes its own shards, and rank 0 completes the checkpoint when all ranks are done.

A background thread of each rank saves while training continues. The ranks coordinate a save only through the rendezvous
store, without collectives. A save has these phases, and an error on any rank ends it after the phase:

1. Each rank writes its files and publishes their checksums ("written").
2. Rank 0 writes the manifest ("manifest").
3. Each rank reads some of the files and compares them with the manifest's checksums ("checked").
4. Rank 0 renames the directory to the checkpoint's name, deletes old checkpoints, and publishes the outcome.

The store keys and the directory of a save are named after the number of the save, because a run can save the same step
again after a rollback. A failed save is reported: the save does not stop the run and does not affect older checkpoints.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

from torch.distributed import DistError, Store

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.directory import bytes_in, commit, folder_of, partial_folder, prune
from megabench.checkpoint.files import Named, check_files, write_assets, write_files
from megabench.checkpoint.health import count_non_finite, describe_non_finite
from megabench.checkpoint.manifest import DamagedError, FileEntry, Manifest
from megabench.checkpoint.shards import StateShard, TrainingState, key, num_elements, view
from megabench.checkpoint.staging import Staging
from megabench.runtime.messages import publish, wait_for
from megabench.runtime.process import host_name
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
    loss and gradient norm. `verified` are the steps of the checkpoints in `directory` whose files this run has compared
    with their checksums. The caller adds the checkpoint from which the run resumed.
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
        self._started = 0.0
        self._num_saves = 0
        self._topic, self._partial = "", directory
        self._stall = self._check = 0.0
        self._warning: str | None = None
        self._non_finite: Counter[str] = Counter()
        self.last_finite_step = 0
        self.verified: set[int] = set()
        self._outcome: Save | None = None

    def start(self, step: int, state: TrainingState, describe: Describe) -> None:
        """Start saving the current values of `state` after `step` steps. Call `finish` before the next `start`.

        With staging, the method returns after copying the state. Without staging, the caller must not change the state
        before `finish` returns.
        """
        assert self._thread is None
        self._started = time.perf_counter()
        self._num_saves += 1
        token = f"{self._token}-{self._num_saves:x}"
        self._topic, self._partial = f"save/{token}", partial_folder(self.directory, step, token)
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
        """Wait for the current save and return its outcome.

        Call `touch` whenever the checkpoint has grown or a rank has read a part of a file back.
        """
        assert self._thread is not None
        waited, progress = time.perf_counter(), 0
        while self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if (now := bytes_in(self._partial) + self._num_parts_read()) > progress:
                progress = now
                touch()
        self._thread = None
        assert self._outcome is not None
        stall = self._stall + time.perf_counter() - waited
        return replace(self._outcome, stall_seconds=stall, check_seconds=self._check)

    def _num_parts_read(self) -> int:
        """Return the number of parts of files that all ranks together have read back so far."""
        with suppress(DistError):  # the thread of the save reports that the store is lost
            return int(self._store.add(f"{self._topic}/read", 0))
        return 0

    def _save(self, step: int, shards: list[StateShard], describe: Describe) -> None:
        """Take part in all phases of a save, as rank 0 or as another rank."""
        try:
            if self._rank == 0:
                self._prune()  # later steps may have shown that the last checkpoint is healthy
            self._publish(f"written/{self._rank}", self._write(shards))
            if self._rank == 0:
                self._publish("manifest", self._describe(describe))
            if not self._receive("manifest")["error"]:
                self._publish(f"checked/{self._rank}", {"error": self._read_back()})
            if self._rank == 0:
                self._publish("outcome", self._conclude(step))
            self._outcome = Save(**self._receive("outcome"))
        except Exception as error:  # the rendezvous store is lost, which means that the run has ended
            self._outcome = Save(step, 0, 0.0, 0.0, error=f"{_here(self._rank)}: {_words(error)}")

    def _publish(self, name: str, message: dict[str, Any]) -> None:
        publish(self._store, f"{self._topic}/{name}", json.dumps(message))

    def _receive(self, name: str) -> dict[str, Any]:
        key = f"{self._topic}/{name}"
        wait_for(self._store, [key])
        message: dict[str, Any] = json.loads(self._store.get(key))
        return message

    def _receive_of_all(self, name: str) -> list[dict[str, Any]]:
        """Wait for the messages of all ranks."""
        wait_for(self._store, [f"{self._topic}/{name}/{rank}" for rank in range(self._world_size)])
        return [self._receive(f"{name}/{rank}") for rank in range(self._world_size)]

    def _write(self, shards: list[StateShard]) -> dict[str, Any]:
        if self._non_finite:
            return {"non_finite": self._non_finite}
        folder = self._partial
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

    def _describe(self, describe: Describe) -> dict[str, Any]:
        """Wait on rank 0 for the files of all ranks, and write the manifest if no rank has reported an error."""
        reports = self._receive_of_all("written")
        non_finite: Counter[str] = Counter()
        for report in reports:
            non_finite.update(report.get("non_finite", {}))
        files = [FileEntry(**file) for report in reports for file in report.get("files", ())]
        error = describe_non_finite(non_finite) if non_finite else _first_error(reports)
        if not error:
            try:
                for file in files:
                    if not (self._partial / file.name).exists():
                        raise FileNotFoundError(
                            f"rank 0 cannot see {file.name}. Save to a directory that all hosts share."
                        )
                elements = sum((Counter(report["elements"]) for report in reports), Counter())
                describe(dict(elements), files).write(self._partial)
            except Exception as problem:
                error = f"{_here(0)}: {_words(problem)}"
        num_bytes = sum(file.num_bytes for file in files)
        return {"error": error, "ends_run": bool(non_finite), "num_bytes": num_bytes}

    def _read_back(self) -> str | None:
        """Read this rank's share of the files, and return an error message if one differs from the manifest."""
        try:
            files = Manifest.read(self._partial).files[self._rank :: self._world_size]
            check_files(self._partial, files, lambda: self._store.add(f"{self._topic}/read", 1))
        except DamagedError as error:
            return f"{_here(self._rank)}: {error}, when the file was read back"
        except Exception as error:
            return f"{_here(self._rank)}: {_words(error)}"
        return None

    def _conclude(self, step: int) -> dict[str, Any]:
        """Complete the checkpoint on rank 0 if all ranks have read the right files, else delete its files."""
        described = self._receive("manifest")
        error = described["error"] or _first_error(self._receive_of_all("checked"))
        # report a lost directory lock instead: another run may have deleted files of this save
        loss = self._claim.loss if self._claim else None
        error = loss or error
        if not error:
            try:
                commit(self._partial, folder_of(self.directory, step))
            except Exception as problem:
                error = f"{_here(0)}: {_words(problem)}"
            else:
                self.verified.add(step)
                self._prune()
        if error:
            shutil.rmtree(self._partial, ignore_errors=True)
        return {
            "step": step,
            "num_bytes": described["num_bytes"],
            "seconds": time.perf_counter() - self._started,
            "stall_seconds": 0.0,
            "error": error,
            "ends_run": described["ends_run"] or bool(loss),
            "warning": self._warning,
        }

    def _prune(self) -> None:
        """Delete old checkpoints. A failed deletion causes a warning, but does not make the save fail."""
        self._warning = None
        if self.keep is not None and not (self._claim and self._claim.loss):
            try:
                prune(self.directory, self.keep, self._token, self.last_finite_step, self.verified)
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


def _first_error(reports: list[dict[str, Any]]) -> str | None:
    return next((report["error"] for report in reports if report.get("error")), None)


def _here(rank: int) -> str:
    return f"rank {rank} ({host_name()})"


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
