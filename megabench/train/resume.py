"""Find the point from which a run resumes: its checkpoint, which must belong to the same training, and its rollbacks.

A run with `on_nan=rollback` returns to its newest healthy checkpoint after a problem, and continues with the batch
after the one that failed. Checkpoints contain the rollbacks before them. A file in the `--save` directory also contains
rollbacks after the newest checkpoint, so that a restarted run skips the same batches.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megabench.atomic_write import write_atomically
from megabench.checkpoint import CheckpointError
from megabench.checkpoint.directory import is_launched_by, steps_in
from megabench.checkpoint.loading import FoundCheckpoint, find_newest_good
from megabench.checkpoint.manifest import Manifest, ModelEntry, TrainingEntry
from megabench.config import FIELDS, SETTINGS, ResolvedConfig
from megabench.data.source import TokenSource
from megabench.inputs import read_json
from megabench.models.find import find_model
from megabench.models.hugging_face import CONFIG_NAME, config_difference
from megabench.record import Rollback
from megabench.runtime.messages import shared
from megabench.runtime.rendezvous import Rendezvous, launch_identity, restart_count
from megabench.settings.setting import names
from megabench.specs.all_settings import engines_with

ROLLBACKS_NAME = ".rollbacks.json"


@dataclass(frozen=True)
class Resume:
    """The starting point of a run: the checkpoint `found`, or step 0. `notes` are messages for the user.

    `continues` is true if an earlier start of this run saved to the `--save` directory. `rollbacks` are the rollbacks
    of earlier starts.
    """

    found: FoundCheckpoint | None = None
    notes: list[str] = field(default_factory=list)
    continues: bool = False
    rollbacks: tuple[Rollback, ...] = ()

    @property
    def training(self) -> TrainingEntry | None:
        return self.found.manifest.training if self.found else None

    @property
    def num_done(self) -> int:
        """The number of steps that earlier runs finished."""
        return self.training.step if self.training else 0


def _loads_own_save(run: ResolvedConfig) -> bool:
    return bool(run.save and run.load and run.save.resolve() == run.load.resolve())


def _is_own_restart(run: ResolvedConfig, rendezvous: Rendezvous) -> bool:
    """Return whether the launcher restarted this run after it saved to `--save`. All ranks get the same result.

    A restart does not prove that this run owns the directory: the first attempt of the run may have been refused.
    """
    if not run.save or restart_count() == 0:
        return False
    is_own = partial(is_launched_by, run.save, launch_identity())
    return bool(shared(rendezvous.store, rendezvous.rank, "resume/is-own-restart", is_own))


def find_resume(run: ResolvedConfig, source: TokenSource, rendezvous: Rendezvous) -> Resume:
    """Return the starting point of `run`. Every rank must call this, and all get the same result.

    A run that the launcher restarted resumes from its own last checkpoint. Raises CheckpointError if `--load` contains
    no valid checkpoint of this training, or if `--save` is the directory of another run.
    """
    is_own_restart = _is_own_restart(run, rendezvous)
    if run.save and is_own_restart:
        found = _find(run.save, rendezvous, "resume/own")
        if found:
            return replace(_checked(found, run, source, rendezvous), continues=True)
    continues = _loads_own_save(run) or is_own_restart
    if run.save and not continues and rendezvous.rank == 0 and (steps := steps_in(run.save)):
        raise CheckpointError(
            f"save={run.save} already contains checkpoints, the newest of step {steps[0]}; add --load {run.save} to "
            f"resume from it, or save to another directory"
        )
    if not run.load:
        return Resume(continues=continues)
    found = _find(run.load, rendezvous, "resume/load")
    if found:
        return replace(_checked(found, run, source, rendezvous), continues=continues)
    if _loads_own_save(run):
        return Resume(notes=[f"{run.load} contains no checkpoint yet: training starts at step 0"], continues=True)
    what = "contains no checkpoint" if run.load.is_dir() else "is not a directory"
    raise CheckpointError(f"load={run.load} {what}; use the --save directory of an earlier run")


def _find(directory: Path, rendezvous: Rendezvous, topic: str) -> FoundCheckpoint | None:
    return find_newest_good(directory, rendezvous.store, rendezvous.rank, rendezvous.world_size, topic)


def _checked(found: FoundCheckpoint, run: ResolvedConfig, source: TokenSource, rendezvous: Rendezvous) -> Resume:
    training = check_belongs(found.folder, found.manifest, run, source)
    notes = [f"skipped the checkpoint {folder}: {problem}" for folder, problem in found.passed_over.items()]
    theirs = training.config
    ours = run.flat()
    # a checkpoint of an earlier version lacks the newest settings of all engines
    before = {name: field.default for name, field in FIELDS.items() if not engines_with(name)} | theirs
    changed = [
        f"{name} {_plain(before[name])} -> {_plain(ours[name])}"
        for name in names(SETTINGS, resume="mention")
        if name in before and name in ours and _plain(before[name]) != _plain(ours[name])
    ]
    if changed:
        notes.append(f"settings changed since {found.folder.name}: {', '.join(changed)}")
    rollbacks = shared(
        rendezvous.store,
        rendezvous.rank,
        "resume/rollbacks",
        lambda: [rollback.model_dump() for rollback in read_rollbacks(found.folder.parent, training)],
    )
    return Resume(found, notes, rollbacks=tuple(Rollback(**entry) for entry in rollbacks))


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value  # as JSON has it


def check_belongs(folder: Path, manifest: Manifest, run: ResolvedConfig, source: TokenSource) -> TrainingEntry:
    """Return the training entry of a checkpoint. Raises CheckpointError if `run` cannot resume from the checkpoint."""
    training = manifest.training
    if training is None:
        raise CheckpointError(
            f"{folder} contains only weights, but --load needs a training state; to start a run from these weights, "
            f"use --model {folder}"
        )
    theirs, ours = manifest.model, ModelEntry.of(run.shape)
    if difference := theirs.difference(ours):
        raise CheckpointError(
            f"{folder} contains {theirs.name}, but the run trains {ours.name} ({difference}); train the same model"
        )
    if run.shape.foreign and (difference := config_difference(find_model(str(folder)), run.shape)):
        raise CheckpointError(
            f"{folder} was trained with another {CONFIG_NAME} than that in {run.model} ({difference}); train the same "
            f"model, or load only the weights with --model {folder}"
        )
    if training.engine != run.engine:
        raise CheckpointError(
            f"{folder} was saved by the {training.engine} engine, but the run's engine is {run.engine}; resume with "
            f"--engine {training.engine}, or load only the weights with --model "
            f"{folder} (or megabench convert export)"
        )
    settings = run.flat()
    for name in names(SETTINGS, resume="same"):
        if name in training.config and name in settings and training.config[name] != settings[name]:
            raise CheckpointError(
                f"{folder} was trained with {name}={training.config[name]}, but the run has "
                f"{name}={settings[name]}; use the same value"
            )
    if training.data.sha256 != source.sha256:
        tokenizer = training.data.tokenizer or training.config.get("tokenizer") or "not known"
        raise CheckpointError(
            f"{folder} was trained on data {training.data.name} (sha256 {training.data.sha256[:12]}) with tokenizer "
            f"{tokenizer}, but the run reads {source.name} ({source.sha256[:12]}) with tokenizer "
            f"{source.tokenizer or 'not known'}; use the same data and the same tokenizer"
        )
    return training


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
        content = read_json(directory / ROLLBACKS_NAME)
        rollbacks = tuple(Rollback.model_validate(entry) for entry in content["rollbacks"])
        is_own = content["run_id"] == training.run_id
    except (OSError, ValueError, KeyError, TypeError):
        return training.rollbacks
    return max(training.rollbacks, rollbacks if is_own else (), key=len)
