"""Save and restore the training state of a run, and report both to the user."""

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.assets import assets_of_run
from megabench.checkpoint.directory import (
    claim_run_id,
    folder_of,
    is_own,
    looks_good,
    new_token,
    remove_partial,
    run_id_of,
    set_aside,
    steps_in,
)
from megabench.checkpoint.loading import FoundCheckpoint, find_newest_good, read_shards
from megabench.checkpoint.manifest import (
    DataEntry,
    FileEntry,
    Manifest,
    ModelEntry,
    OptimizerEntry,
    TrainingEntry,
)
from megabench.checkpoint.save import Save, Saver
from megabench.checkpoint.shards import TrainingState
from megabench.checkpoint.staging import Staging, free_host_bytes, owned_bytes
from megabench.config import ResolvedConfig
from megabench.data.source import TokenSource
from megabench.engines.base import Engine, StepResult
from megabench.models.mapping import hidden_matrices, hugging_face_shapes, stored_shapes
from megabench.optim.optimizers import OPTIMIZERS
from megabench.record import LayoutSizes, LoadTimes, Rollback, SaveTimes
from megabench.runtime import environment
from megabench.runtime.messages import shared
from megabench.runtime.rendezvous import Rendezvous, launch_identity
from megabench.runtime.run_lock import RunLock
from megabench.train.nan_guard import NanGuard
from megabench.train.resume import Resume, batch_of_step, write_rollbacks
from megabench.train.stopping import StoppedError


def restore(engine: Engine, found: FoundCheckpoint, device: torch.device) -> LoadTimes:
    """Load the state of a checkpoint into the engine. Collective."""
    training = found.manifest.training
    assert training is not None
    began = time.perf_counter()
    read_shards(found.folder, found.manifest, engine.training_state().shards)
    engine.restored(training.optimizer.step, training.optimizer.loss_scale)
    dist.barrier()
    seconds = time.perf_counter() - began
    num_bytes = found.manifest.num_bytes
    return LoadTimes(
        folder=str(found.folder),
        num_bytes=num_bytes,
        check_seconds=found.seconds,
        load_seconds=seconds,
        gb_per_second=num_bytes / 1e9 / seconds,
    )


class Checkpoints:
    """Saves checkpoints of a run: every `save_every` steps, after the last step, and when a signal stops the run.

    `note` prints a message. `on_save` is called with each complete checkpoint. `touch` is called while training waits
    for a save whose files still grow. `lock` is the lock that rank 0 holds on the directory. `rollbacks` are all
    rollbacks of the run so far.
    """

    def __init__(
        self,
        run: ResolvedConfig,
        source: TokenSource,
        engine: Engine,
        rendezvous: Rendezvous,
        resume: Resume,
        device: torch.device,
        nan_guard: NanGuard | None = None,
        note: Callable[[str], None] = lambda text: None,
        on_save: Callable[[SaveTimes], None] = lambda save: None,
        touch: Callable[[], None] = lambda: None,
        lock: RunLock | None = None,
    ) -> None:
        assert run.save is not None
        self._say, self._on_save, self._touch = note, on_save, touch
        self._run, self._source, self._engine = run, source, engine
        self._device = device
        self._newest = resume.num_done
        self._rendezvous = rendezvous
        self._nan_guard = nan_guard or NanGuard(run)
        self.rollbacks = list(resume.rollbacks)
        self._resumed = resume.num_done if resume.found and self._is_in_save(resume.found.folder) else None
        self._loaded = resume.found
        is_after_rollback = self.rollbacks and self.rollbacks[-1].restored_step == resume.num_done
        self._restored = resume.num_done if is_after_rollback else -1  # this step's checkpoint has proved healthy
        self._lock = lock
        self._good_step = resume.num_done  # the newest step with a finite state; later states are not saved yet
        self._is_postponed = False
        self._end: str | None = None  # the reason why no later save can succeed
        self.times: list[SaveTimes] = []
        rank = dist.get_rank()
        staging = self._stage(rendezvous.local_world_size, device)
        self._mode: Literal["sync", "async"] = "async" if staging else "sync"
        token = [""]
        if rank == 0:
            run_id = claim_run_id(run.save, launch_identity(), resume.continues)
            token = [new_token(run_id)]
            self._clean(run.save, run_id)
            self._set_aside(resume)
        dist.broadcast_object_list(token)  # send this after the cleanup, because ranks then start to save
        self._token, self._run_id = token[0], run_id_of(token[0])
        assets = assets_of_run(run, self._note) if rank == 0 else {}
        self._saver = Saver(
            run.save, rendezvous.store, rank, dist.get_world_size(), self._token, lock, staging, run.keep, assets
        )
        self._saver.last_finite_step = resume.num_done
        if self._resumed is not None:
            self._saver.verified.add(self._resumed)

    def _stage(self, local_world_size: int, device: torch.device) -> Staging | None:
        """Allocate host memory for asynchronous saves if they are enabled and every host has enough memory."""
        run = self._run
        if run.save_mode == "sync" or (run.save_mode == "auto" and device.type == "cpu"):
            return None
        shards = self._engine.training_state().shards
        needed = owned_bytes(shards)
        largest = torch.tensor(
            [needed, needed * local_world_size - free_host_bytes()], dtype=torch.int64, device=device
        )
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        gib, missing_gib = (value / 2**30 for value in largest.tolist())
        if missing_gib > 0 and run.save_mode == "auto":
            self._note(
                f"falling back to synchronous saves: asynchronous saving needs {gib:.1f} GiB of host memory per rank, "
                f"and a host is short by {missing_gib:.1f} GiB"
            )
            return None
        self._note(f"asynchronous saving uses {gib:.1f} GiB of host memory per rank")
        return Staging(shards)

    def _clean(self, directory: Path, run_id: str) -> None:
        """Delete unfinished saves of earlier starts of this run, and report files that other runs left."""
        if others := remove_partial(directory, run_id):
            self._note(f"not deleting unfinished saves of other runs: {', '.join(map(str, others))}")
        others = [folder for step in steps_in(directory) if not is_own(folder := folder_of(directory, step), run_id)]
        if others and self._run.keep is not None:
            names = ", ".join(folder.name for folder in others)
            self._note(f"not deleting checkpoints of other runs despite --keep: {names}")

    def _set_aside(self, resume: Resume) -> None:
        """Rename damaged checkpoints that are newer than the one the run resumes from, so that they are ignored."""
        for folder in resume.found.passed_over if resume.found else ():
            if self._is_in_save(folder):
                self._rename(folder, "damaged")

    def _is_in_save(self, folder: Path) -> bool:
        return self._run.save is not None and folder.parent.resolve() == self._run.save.resolve()

    def _rename(self, folder: Path, state: Literal["damaged", "unhealthy"]) -> None:
        self._note(f"{folder} is now {set_aside(folder, state).name}")

    def _note(self, text: str) -> None:
        self._say(f"checkpoints: {text}")

    def observe(self, step: int, result: StepResult, is_wrong: bool) -> None:
        """Record the result of `step`.

        Call this before `due_step`. `is_wrong` is whether the step did not update the weights or the run does not
        continue from it.
        """
        if is_wrong:
            return
        self._good_step = step
        # a step that fp16's loss scaling skipped is not wrong, but it does not prove that the weights are healthy
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            self._saver.last_finite_step = step

    def due_step(self, step: int, is_last: bool) -> int | None:
        """Return the step whose state must be saved after `step`, or None. `is_last` is true if no other step follows.

        A save that is due at a non-finite step is postponed to the next finite step. If no step follows, the state is
        saved under the number of the newest finite step, because the later steps did not update it.
        """
        every = self._run.save_every
        is_wanted = is_last or self._is_postponed or (every is not None and step % every == 0)
        if not is_wanted:
            return None
        if self._good_step < step:
            newest = (
                f"the weights are still those of step {self._good_step}" if is_last else "the next finite step is saved"
            )
            self._note(f"step {step} is not saved, because its loss or gradients are not finite; {newest}")
            self._is_postponed = not is_last
            if not is_last:
                return None
        return self._good_step if self._good_step > self._newest else None

    def save(self, step: int) -> float:
        """Start saving the state after `step` steps. Return the seconds that training waited.

        Raises StoppedError on every rank if no later save can succeed, because another run has taken the directory over
        or the state to be saved is not finite.
        """
        began = time.perf_counter()
        self._is_postponed = False
        self._finish()
        self._check_end()
        state = self._engine.training_state()
        self._newest, losses = step, self._nan_guard.recent_losses
        self._saver.start(step, state, lambda elements, files: self._manifest(step, state, losses, elements, files))
        if self._mode == "sync" or not self._is_finite_everywhere():
            self._finish()
            self._check_end()
        return time.perf_counter() - began

    def _is_finite_everywhere(self) -> bool:
        """Return whether the state of all ranks was finite when the save began. Collective."""
        is_finite = torch.tensor([self._saver.is_finite], dtype=torch.int, device=self._device)
        dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
        return bool(is_finite)

    def _check_end(self) -> None:
        if self._end:
            raise StoppedError(self._end)

    def poll(self) -> None:
        """Complete the save in progress if all its files are written."""
        if self._saver.is_done:
            self._finish()

    def close(self) -> str | None:
        """Wait for the save in progress.

        Return an error message if the last save failed, else None. All ranks get the same result.
        """
        self._finish()
        if not self.times or not (error := self.times[-1].error):
            return None
        return f"the run's last checkpoint, of step {self._newest}, could not be saved: {error}; {self._kept()}"

    def _finish(self) -> None:
        if not self._saver.is_saving:
            return
        save = self._saver.finish(self._touch)
        self.times.append(self._times(save))
        self._end = (
            f"the checkpoint of step {save.step} was not saved: {save.error}; {self._kept()}" if save.ends_run else None
        )
        if save.warning:
            self._note(save.warning)
        if save.error:
            self._say(f"ERROR: the checkpoint of step {save.step} was not saved: {save.error}; {self._kept()}")
        else:
            self._on_save(self.times[-1])

    def _kept(self) -> str:
        good = self._good_saves()
        return f"the newest good one of this run is that of step {good[-1]}" if good else "this run has no checkpoint"

    @property
    def newest_healthy(self) -> str:
        """Return the name of this run's newest checkpoint that a later finite step has confirmed as healthy."""
        healthy = [step for step in self._good_saves() if step < self._saver.last_finite_step]
        return f"the newest healthy checkpoint of this run is that of step {healthy[-1]}" if healthy else self._kept()

    def _good_saves(self) -> list[int]:
        """The steps of this run's checkpoints that still exist, oldest first, with the one it resumed from."""
        assert self._run.save is not None
        resumed = [self._resumed] if self._resumed is not None else []
        saved = resumed + [times.step for times in self.times if not times.error]
        return [step for step in saved if looks_good(folder_of(self._run.save, step))]

    def _times(self, save: Save) -> SaveTimes:
        return SaveTimes(
            step=save.step,
            mode=self._mode,
            num_bytes=save.num_bytes,
            seconds=save.seconds,
            stall_seconds=save.stall_seconds,
            check_seconds=save.check_seconds,
            gb_per_second=save.num_bytes / 1e9 / save.seconds if save.seconds and not save.error else None,
            error=save.error,
        )

    def find_healthy(self) -> FoundCheckpoint | None:
        """Return the newest healthy checkpoint, or None. Collective.

        A checkpoint is healthy if a later step was finite. If this run has saved none, the checkpoint from which it
        resumed may be healthy. Raises StoppedError on every rank if another run now owns the directory.
        """
        assert self._run.save is not None
        self._finish()
        store, topic = self._rendezvous.store, f"rollback/{self._token}/{len(self.rollbacks)}"
        if loss := shared(store, dist.get_rank(), f"{topic}/lock", lambda: self._lock.loss if self._lock else None):
            raise StoppedError(f"the run cannot return to a checkpoint: {loss}")
        below = max(self._saver.last_finite_step, self._restored + 1)
        found = self._find(self._run.save, f"{topic}/save", below)
        loaded = self._loaded
        if found or not loaded or self._is_in_save(loaded.folder):
            return found
        is_healthy = loaded.manifest.training and loaded.manifest.training.step < below
        return self._find(loaded.folder, f"{topic}/load", below) if is_healthy else None

    def _find(self, directory: Path, topic: str, below: int) -> FoundCheckpoint | None:
        store, rank, world_size = self._rendezvous.store, dist.get_rank(), dist.get_world_size()
        try:
            return find_newest_good(directory, store, rank, world_size, topic, below)
        except CheckpointError:
            return None

    def roll_back(self, found: FoundCheckpoint, rollback: Rollback) -> None:
        """Restore a healthy checkpoint, and set newer checkpoints of this run aside. Collective.

        An interrupted rollback is repeated after a restart, because the rollback is recorded last.
        """
        assert self._run.save is not None and found.manifest.training is not None
        self.rollbacks.append(rollback)
        step = self._newest = self._good_step = self._saver.last_finite_step = rollback.restored_step
        self._restored = step
        self._saver.verified = {older for older in self._saver.verified if older < step}
        if self._is_in_save(found.folder):
            self._saver.verified.add(step)
        self._is_postponed = False
        self.times = [times for times in self.times if times.step <= step]
        self._resumed = self._resumed and min(self._resumed, step)
        if dist.get_rank() == 0:
            for newer in steps_in(self._run.save):
                if newer > step:
                    folder = folder_of(self._run.save, newer)
                    self._rename(folder, "damaged" if folder in found.passed_over else "unhealthy")
            write_rollbacks(self._run.save, self._run_id, self.rollbacks)
        restore(self._engine, found, self._device)
        self._nan_guard.restart(found.manifest.training.recent_losses)

    def _manifest(
        self,
        step: int,
        state: TrainingState,
        recent_losses: tuple[float, ...],
        elements: dict[str, int],
        files: list[FileEntry],
    ) -> Manifest:
        """Return the manifest for the state after `step` steps. Every parameter must be in the files exactly once."""
        run = self._run
        expected = Counter[str](weight=sum(map(math.prod, stored_shapes(run.shape).values())))
        hidden = hidden_matrices(run.shape)
        for name, shape in hugging_face_shapes(run.shape).items():
            for kind, size in OPTIMIZERS[run.optimizer].state(shape, name in hidden).items():
                expected[kind] += math.prod(size)
        assert elements == expected, f"{elements} elements saved instead of {expected}"
        return Manifest(
            model=ModelEntry.of(run.shape),
            training=TrainingEntry(
                run_id=self._run_id,
                step=step,
                engine=run.engine,
                layout=LayoutSizes(**vars(run.layout)).model_dump(),
                world_size=run.world_size,
                optimizer=OptimizerEntry(name=run.optimizer, step=state.optimizer_step, loss_scale=state.loss_scale),
                data=DataEntry(
                    name=self._source.name,
                    sha256=self._source.sha256,
                    tokenizer=self._source.tokenizer,
                    next_sequence=batch_of_step(self.rollbacks, step) * run.global_batch,
                ),
                config=run.flat(mode="json"),
                rollbacks=tuple(self.rollbacks),
                recent_losses=recent_losses,
            ),
            num_elements=elements,
            versions=environment.versions(),
            files=tuple(files),
        )
