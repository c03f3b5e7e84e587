"""Rollbacks: the batches that they skip, and their file in the `--save` directory.

A run with `on_nan=rollback` returns to its newest healthy checkpoint after a problem, and continues with the batch
after the one that failed. Checkpoints contain the rollbacks before them. The file also contains rollbacks after the
newest checkpoint, so that a restarted run skips the same batches.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from megabench.atomic_write import write_atomically
from megabench.checkpoint.manifest import TrainingEntry
from megabench.record import Rollback

ROLLBACKS_NAME = ".rollbacks.json"


def batch_of_step(rollbacks: Sequence[Rollback], step: int) -> int:
    """Return the index of the global batch of step `step`, both counted from 0."""
    last = next((rollback for rollback in reversed(rollbacks) if rollback.restored_step <= step), None)
    return step + last.next_batch - last.restored_step if last else step


def write_rollbacks(directory: Path, run_id: str, rollbacks: Sequence[Rollback]) -> None:
    """Write all rollbacks of run `run_id` atomically."""
    content = {"run_id": run_id, "rollbacks": [rollback.model_dump() for rollback in rollbacks]}
    write_atomically(directory / ROLLBACKS_NAME, json.dumps(content, indent=1) + "\n")


def read_rollbacks(directory: Path, training: TrainingEntry) -> tuple[Rollback, ...]:
    """Return the rollbacks of the run that wrote a checkpoint in `directory`, from the checkpoint and the file.

    An unreadable file, or the file of another run, is ignored.
    """
    try:
        content = json.loads((directory / ROLLBACKS_NAME).read_text(encoding="utf-8"))
        rollbacks = tuple(Rollback.model_validate(entry) for entry in content["rollbacks"])
        is_own = content["run_id"] == training.run_id
    except (OSError, ValueError, KeyError, TypeError):
        return training.rollbacks
    return max(training.rollbacks, rollbacks if is_own else (), key=len)
