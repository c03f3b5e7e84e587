"""Loading: which checkpoint is the newest good one, and this rank's part out of it."""

import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.directory import check_sizes, check_step, folder_of, is_checkpoint, steps_in
from megabench.checkpoint.files import TensorFiles, check_files, check_tensors, num_threads
from megabench.checkpoint.manifest import DamagedError, Manifest
from megabench.checkpoint.shards import StateShard, view
from megabench.runtime.messages import wait_for


@dataclass(frozen=True)
class Found:
    """A good checkpoint, and why each newer one was passed over. `seconds` is what checking its files took."""

    folder: Path
    manifest: Manifest
    passed_over: dict[Path, str]
    seconds: float


def find_newest_good(directory: Path, store: Store, rank: int, world_size: int, topic: str) -> Found | None:
    """The newest checkpoint of a directory whose files match the manifest's checksums and hold finite values alone.

    The folder of a checkpoint itself stands for that one alone.
    Every rank must call it, and all get the same; each checks a part of the files. None where the directory holds no
    checkpoint at all. CheckpointError where it holds none that is good, or the newest is of a schema that is not known.
    `topic` names this search in the store, once.
    """
    passed_over: dict[Path, str] = {}
    started = time.perf_counter()
    if is_checkpoint(directory):
        folders = [directory]
    else:
        folders = [folder_of(directory, step) for step in _agreed_steps(directory, store, rank, topic)]
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
            return Found(folder, manifest, passed_over, time.perf_counter() - started)
        passed_over[folder] = problem
    if not passed_over:
        return None
    newest = next(iter(passed_over))
    more = f"; {len(passed_over) - 1} older ones are damaged, too" if len(passed_over) > 1 else ""
    state = "is damaged" if newest == directory else "has no good checkpoint left"
    raise CheckpointError(
        f"{directory} {state}: in {newest.name}, {passed_over[newest]}{more}; "
        f"load another directory, or start anew without --load and with another --save"
    )


def _agreed_steps(directory: Path, store: Store, rank: int, topic: str) -> list[int]:
    """What rank 0 sees in the directory: hosts of a shared file system may be late to see the newest."""
    if rank == 0:
        store.set(f"{topic}/steps", json.dumps(steps_in(directory)))
    wait_for(store, [f"{topic}/steps"])
    steps: list[int] = json.loads(store.get(f"{topic}/steps"))
    return steps


def _first_of_all(
    store: Store, rank: int, world_size: int, topic: str, problem: str | None, refused: str | None
) -> tuple[str | None, str | None]:
    """The problem and the refusal of the first rank that has one."""
    store.set(f"{topic}/{rank}", json.dumps([problem, refused]))
    keys = [f"{topic}/{other}" for other in range(world_size)]
    wait_for(store, keys)
    said = [json.loads(store.get(key)) for key in keys]
    return next((p for p, _ in said if p), None), next((r for _, r in said if r), None)


def read_shards(folder: Path, manifest: Manifest, shards: Iterable[StateShard]) -> None:
    """Fills every shard with its part of a checkpoint, whatever layout wrote it.

    Values are converted to the dtype of the shard. CheckpointError where the checkpoint holds not all of them.
    """
    files = TensorFiles(folder, manifest.files)

    def fill(shard: StateShard) -> None:
        for block in shard.blocks:
            files.read(shard.kind, block.piece, into=view(shard.values, block))

    try:
        with ThreadPoolExecutor(num_threads()) as pool:
            list(pool.map(fill, shards))
    except DamagedError as error:
        raise CheckpointError(f"{folder} cannot be loaded: {error}") from None
