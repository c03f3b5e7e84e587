"""Loading of checkpoints: finding the newest valid checkpoint, and reading this rank's shards."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.distributed import Store

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.directory import check_sizes, check_step, folder_of, is_checkpoint, steps_in
from megabench.checkpoint.files import TensorFiles, check_files, check_tensors, num_threads
from megabench.checkpoint.manifest import DamagedError, Manifest
from megabench.checkpoint.shards import StateShard, view
from megabench.runtime.messages import gathered, shared


@dataclass(frozen=True)
class FoundCheckpoint:
    """A valid checkpoint, and the reason for skipping each newer checkpoint.

    `seconds` is the duration of the search, including checking the files.
    """

    folder: Path
    manifest: Manifest
    passed_over: dict[Path, str]
    seconds: float


def find_newest_good(
    directory: Path, store: Store, rank: int, world_size: int, topic: str, below: int | None = None
) -> FoundCheckpoint | None:
    """Return the newest valid checkpoint of a directory, or None if the directory contains no checkpoint.

    `below` restricts the search to checkpoints of smaller steps.

    A checkpoint is valid if its files match the checksums in the manifest and contain only finite values. If
    `directory` is itself a checkpoint, the function checks only that checkpoint. All ranks must call the function. Each
    rank checks some of the files, and all ranks get the same result. `topic` is a prefix of store keys, unique to each
    call.

    Raises:
        CheckpointError: No checkpoint in the directory is valid, or a manifest has another schema version.
    """
    passed_over: dict[Path, str] = {}
    started = time.perf_counter()
    if is_checkpoint(directory):
        folders = [directory]
    else:
        steps = shared(store, rank, f"{topic}/steps", lambda: steps_in(directory))
        folders = [folder_of(directory, step) for step in steps if below is None or step < below]
    for number, folder in enumerate(folders):
        problem, refused = None, None
        try:
            manifest = Manifest.read(folder)
            check_step(folder, manifest)
            check_sizes(folder, manifest)
            mine = manifest.files[rank::world_size]
            check_files(folder, mine)
            check_tensors(folder, mine, is_training_state=manifest.training is not None)
        except DamagedError as error:
            problem = str(error)
        except CheckpointError as error:
            refused = str(error)
        problem, refused = _first_of_all(store, rank, world_size, f"{topic}/{number}", problem, refused)
        if refused:
            raise CheckpointError(refused)
        if problem is None:
            return FoundCheckpoint(folder, manifest, passed_over, time.perf_counter() - started)
        passed_over[folder] = problem
    if not passed_over:
        return None
    newest = next(iter(passed_over))
    more = f"; older damaged checkpoints: {len(passed_over) - 1}" if len(passed_over) > 1 else ""
    state = "is damaged" if newest == directory else "contains no valid checkpoint"
    raise CheckpointError(
        f"{directory} {state}: in {newest.name}, {passed_over[newest]}{more}. "
        f"Load another directory, or start a new run without --load and with another --save directory."
    )


def _first_of_all(
    store: Store, rank: int, world_size: int, topic: str, problem: str | None, refused: str | None
) -> tuple[str | None, str | None]:
    """Return the first `problem` and the first `refused` that is not None on a rank, in the order of ranks."""
    said = gathered(store, rank, world_size, topic, [problem, refused])
    return next((p for p, _ in said if p), None), next((r for _, r in said if r), None)


def read_shards(folder: Path, manifest: Manifest, shards: Iterable[StateShard]) -> None:
    """Read the values of all shards from a checkpoint that was written under any layout.

    Values are converted to the dtype of each shard.

    Raises:
        CheckpointError: The checkpoint does not contain all values of the shards.
    """

    def fill(files: TensorFiles, shard: StateShard) -> None:
        for block in shard.blocks:
            files.read(shard.kind, block.piece, into=view(shard.values, block))

    try:
        with ThreadPoolExecutor(num_threads()) as pool:
            list(pool.map(partial(fill, TensorFiles(folder, manifest.files)), shards))
    except DamagedError as error:
        raise CheckpointError(f"{folder} cannot be loaded: {error}") from None
