"""Write sketches (random projections) of gradients, weights and second moments, to compare two runs.

The sketches are those of the first steps.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megabench import sketch
from megabench.checkpoint.shards import StateShard, view
from megabench.config import ConfigError
from megabench.runtime.rendezvous import gather_objects
from megabench.train.callbacks.callback import Callback, Step, TrainerState

NUM_GRADIENTS = 3  # gradients of later steps contain the rounding of earlier ones


class TensorSketches(Callback):
    """Writes sketches of every tensor to the file `path`: the initial weights, the gradients of the first three steps,
    and what the first step and the first `last` steps have changed in the weights and second moments.

    The gradients come from Adam's first moments, so the run needs the optimizer adamw. They are those of the mean loss
    before clipping. `megabench parity A B` compares two files.
    """

    def __init__(self, path: str, last: int = NUM_GRADIENTS) -> None:
        self._path, self._last = Path(path), last
        self._sketches: dict[sketch.Key, Tensor] = {}
        self._first_moments: dict[str, Tensor] = {}

    def on_start(self, trainer: TrainerState) -> None:
        if trainer.run.optimizer != "adamw":
            raise ConfigError(
                f"callbacks=TensorSketches reads gradients from the moments of adamw, not of {trainer.run.optimizer}; "
                f"use --optimizer adamw"
            )
        if trainer.run.steps < (needed := max(NUM_GRADIENTS, self._last)):
            raise ConfigError(
                f"callbacks=TensorSketches writes its file after step {needed}, and steps={trainer.run.steps}; use "
                f"--steps {needed} or more"
            )
        self._trainer = trainer

    def on_ready(self, trainer: TrainerState) -> None:
        if trainer.num_before:
            raise ConfigError("callbacks=TensorSketches compares the first steps of a run; start a run without --load")
        self._weights = self._sketched("weight")
        self._sketches |= {("weight", 0, name): one for name, one in self._weights.items()}

    def between_steps(self, step: Step) -> None:
        number = step.number
        if number <= NUM_GRADIENTS:
            self._add_gradients(step)
        if number in (1, self._last):
            for name, one in self._sketched("weight").items():
                self._sketches["update", number, name] = one - self._weights[name]
            self._sketches |= {("exp_avg_sq", number, name): one for name, one in self._sketched("exp_avg_sq").items()}
        if number == max(NUM_GRADIENTS, self._last) and self._trainer.rank == 0:
            run = self._trainer.run
            self._path.parent.mkdir(parents=True, exist_ok=True)
            norm = repr(self._grad_norm)
            sketch.write(self._path, self._sketches, precision=run.precision, model=run.model, grad_norm=norm)

    def _add_gradients(self, step: Step) -> None:
        run, moments = self._trainer.run, self._sketched("exp_avg")
        norm = step.result.grad_norm
        if step.number == 1:
            self._grad_norm = norm
        clip = min(1.0, run.clip_grad / (norm + 1e-6)) if run.clip_grad else 1.0
        for name, moment in moments.items():
            beta1 = run.hyper_parameters(name, num_dims=2).betas[0]  # betas do not depend on the dimensions
            before = self._first_moments.get(name)
            self._sketches["gradient", step.number, name] = sketch.gradients(moment, before, beta1, clip)
        self._first_moments = moments

    def _sketched(self, kind: str) -> dict[str, Tensor]:
        """Return the sketch of each tensor of this kind, summed over the ranks. Collective."""
        shards = [
            shard for shard in self._trainer.engine.training_state().shards if shard.kind == kind and shard.is_owner
        ]
        shapes = _shapes(shards)
        device = self._trainer.device
        found = {
            name: torch.zeros(2, sketch.NUM_BLOCKS, 1 + sketch.NUM_SIGNS, dtype=torch.float64, device=device)
            for name in shapes
        }
        for shard in shards:
            for block in shard.blocks:
                piece = block.piece
                start = (piece.rows[0], *(piece.columns or ())[:1])
                found[piece.name] += sketch.sketch(piece.name, shapes[piece.name], view(shard.values, block), start)
        if found:
            everything = torch.stack(list(found.values()))
            dist.all_reduce(everything)
            found = dict(zip(found, everything.cpu(), strict=True))
        return found


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
    return tuple(map(max, one, other)) if other else one
