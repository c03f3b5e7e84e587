"""Write sketches (random projections) of gradients, weights and second moments, to compare two runs.

The sketches are those of the first steps.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megabench import sketch
from megabench.checkpoint.shards import StateShard, view
from megabench.config.run_config import STEPS_OF_SKETCHES
from megabench.record import Sketches
from megabench.runtime.rendezvous import gather_objects
from megabench.train.callbacks.callback import Callback, Step, TrainerState
from megabench.train.state_checks import hyper_parameters_in_use, state_problems


class TensorSketches(Callback):
    """Writes sketches of every tensor to the file `path`, which `megabench parity A B` compares.

    They are those of the initial weights, of the gradients of the first three updates, and of what the first update and
    the first three have changed in the weights and second moments. The gradients are those of the mean loss before
    clipping. A step that fp16 skips is no update.

    With adamw, gradients are computed from the first moments, of which each rank has a part. With other optimizers,
    whole gradients are gathered before the update, which takes longer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sketches: dict[sketch.Key, Tensor] = {}
        self._first_moments: dict[str, Tensor] = {}
        self._problems: list[str] = []
        self._gathered: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._num_updates, self._seconds = 0, 0.0
        self._hyper_parameters: dict[str, dict[str, Any]] = {}
        self._num_bytes = 0  # of the file, when it is written

    def on_ready(self, trainer: TrainerState) -> None:
        self._trainer = trainer
        if trainer.num_before:
            trainer.note(f"sketches: not written, because the run continues after step {trainer.num_before}")
            self._num_updates = STEPS_OF_SKETCHES
            return
        if trainer.run.has_readable_state:
            with self._timed():
                self._weights = self._sketched("weight")
                self._sketches |= {("weight", 0, name): one for name, one in self._weights.items()}

    def before_update(self, step: int) -> None:
        run = self._trainer.run
        # the first step in which the forward pass uses updated weights
        if self._num_updates == 1 and run.has_readable_state and step == 2 <= run.warmup_steps:
            with self._timed():
                self._check_state()
        if not run.has_readable_moments and self._num_updates < STEPS_OF_SKETCHES:
            if step <= run.warmup_steps:
                with self._timed():
                    self._gathered = self._sketch_gradients()
            else:  # fp16 has skipped steps, and gathering would change the time of this step
                self._num_updates = STEPS_OF_SKETCHES

    def between_steps(self, step: Step) -> None:
        if self._num_updates == STEPS_OF_SKETCHES or step.result.skipped:
            return
        self._num_updates += 1
        with self._timed():
            self._add(self._num_updates, step.result.grad_norm)
            if self._num_updates == STEPS_OF_SKETCHES:
                self._finish()

    def section(self, by_rank: Sequence[Any]) -> Mapping[str, Any]:
        if not self._num_bytes and not self._problems:
            return {}
        return {
            "sketches": Sketches(
                num_tensors=len({name for _, _, name in self._sketches}),
                num_bytes=self._num_bytes,
                seconds=round(self._seconds, 3),
                problems=self._problems,
            )
        }

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def _add(self, number: int, grad_norm: float) -> None:
        """Add the sketches after update `number`."""
        gradients = self._gradients(grad_norm) if self._trainer.run.has_readable_moments else self._gathered
        self._sketches |= {("gradient", number, name): one for name, one in gradients.items()}
        if number == 1:
            self._grad_norm = grad_norm
        if number not in (1, STEPS_OF_SKETCHES):
            return
        if self._trainer.run.has_readable_state:
            for name, one in self._sketched("weight").items():
                self._sketches["update", number, name] = one - self._weights[name]
        if self._trainer.run.has_readable_moments:
            self._sketches |= {("exp_avg_sq", number, name): one for name, one in self._sketched("exp_avg_sq").items()}

    def _gradients(self, grad_norm: float) -> dict[str, Tensor]:
        """Return the sketches of the gradients of the last update, from Adam's first moments."""
        run, moments = self._trainer.run, self._sketched("exp_avg")
        clip = min(1.0, run.clip_grad / (grad_norm + 1e-6)) if run.clip_grad else 1.0
        found = {}
        for name, moment in moments.items():
            beta1 = run.hyper_parameters(name, num_dims=2).betas[0]  # betas do not depend on the dimensions
            found[name] = sketch.gradients(moment, self._first_moments.get(name), beta1, clip)
        self._first_moments = moments
        return found

    def _sketch_gradients(self) -> dict[str, Tensor]:
        """Return the sketches of the accumulated gradients. Each rank sketches some of the tensors. Collective."""
        rank, device = dist.get_rank(), self._trainer.device
        found = {}
        for number, (name, gradient) in enumerate(self._trainer.engine.full_tensors("gradients")):
            matrix = gradient.reshape(len(gradient), -1) if gradient.ndim > 1 else gradient
            is_mine = number % dist.get_world_size() == rank
            found[name] = sketch.sketch(name, matrix.shape, matrix, device=device) if is_mine else _empty(device)
        self._trainer.watchdog.touch()
        return _summed(found)

    def _check_state(self) -> None:
        engine = self._trainer.engine
        shapes = _shapes([shard for shard in engine.training_state().shards if shard.kind == "weight"])
        self._hyper_parameters, unequal = hyper_parameters_in_use(engine)
        self._problems = [*state_problems(engine, shapes), *unequal]
        self._trainer.watchdog.touch()

    def _finish(self) -> None:
        """Write the file on rank 0, while the other ranks wait. Collective."""
        if self._trainer.rank == 0:
            self._write()
        self._weights, self._first_moments, self._gathered = {}, {}, {}
        dist.barrier()  # otherwise the next step of the other ranks would include the time of writing

    def _write(self) -> None:
        run = self._trainer.run
        try:
            sketch.write(
                self._path,
                self._sketches,
                model=run.model,
                precision=run.precision,
                optimizer=run.optimizer,
                grad_dtype=run.grad_dtype,
                grad_norm=repr(self._grad_norm),
                hyper_parameters=json.dumps(self._hyper_parameters, sort_keys=True),
                problems=json.dumps(self._problems),
            )
            self._num_bytes = self._path.stat().st_size
        except (OSError, SafetensorError) as error:  # training goes on without sketches
            self._trainer.note(f"WARNING: sketches={self._path} could not be written: {error}")

    def _sketched(self, kind: str) -> dict[str, Tensor]:
        """Return the sketch of each tensor of this kind, summed over the ranks. Collective."""
        shards = [
            shard for shard in self._trainer.engine.training_state().shards if shard.kind == kind and shard.is_owner
        ]
        shapes, device = _shapes(shards), self._trainer.device
        found = {name: _empty(device) for name in shapes}
        for shard in shards:
            for block in shard.blocks:
                piece = block.piece
                start = (piece.rows[0], *(piece.columns or ())[:1])
                values = view(shard.values, block)
                found[piece.name] += sketch.sketch(piece.name, shapes[piece.name], values, start, device)
        self._trainer.watchdog.touch()  # a pass over the weights of a large model takes long
        return _summed(found)


def _empty(device: torch.device) -> Tensor:
    return torch.zeros(2, sketch.NUM_BLOCKS, 1 + sketch.NUM_SIGNS, dtype=torch.float64, device=device)


def _summed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of all ranks' sketches on CPU of rank 0, and nothing on other ranks. Collective."""
    if not found:
        return {}
    everything = torch.stack(list(found.values()))
    dist.all_reduce(everything)
    return dict(zip(found, everything.cpu(), strict=True)) if dist.get_rank() == 0 else {}


def _shapes(shards: Iterable[StateShard]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of which any rank has a block, in the same order on all ranks. Collective."""
    ends: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for block in shard.blocks:
            piece = block.piece
            end = (piece.rows[1], *(piece.columns or ())[1:])
            ends[piece.name] = _larger(end, ends.get(piece.name))
    everyone: dict[str, tuple[int, ...]] = {}
    for of_rank in gather_objects(ends):
        for name, end in of_rank.items():
            everyone[name] = _larger(end, everyone.get(name))
    return dict(sorted(everyone.items()))


def _larger(one: tuple[int, ...], other: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(max(pair) for pair in zip(one, other, strict=True)) if other else one
