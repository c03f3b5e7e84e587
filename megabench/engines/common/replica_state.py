"""The training state of engines whose torch optimizer updates fp32 tensors, each a range of a parameter's elements."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megabench.checkpoint.shards import StateShard, TrainingState, blocks_of, whole
from megabench.config import ResolvedConfig
from megabench.engines.common.loss_scale import LossScale
from megabench.models.mapping import hidden_matrices, hugging_face_shapes
from megabench.optim.optimizers import OPTIMIZERS, StateKind


@dataclass(frozen=True)
class Held:
    """The elements of a parameter from `first` on that this rank's optimizer updates.

    Only the owner of the elements saves them.
    """

    name: str
    values: nn.Parameter
    first: int
    is_owner: bool


class ReplicaState:
    """Reads and restores the master weights and moments of an optimizer."""

    def __init__(
        self,
        run: ResolvedConfig,
        optimizer: torch.optim.Optimizer,
        held: Sequence[Held],
        loss_scale: LossScale | None,
    ) -> None:
        self._run, self._optimizer, self._held, self._loss_scale = run, optimizer, held, loss_scale

    def read(self) -> TrainingState:
        """This rank's tensors, alive."""
        shapes, hidden = hugging_face_shapes(self._run.shape), hidden_matrices(self._run.shape)
        shards = []
        for held in self._held:
            for kind, values in self._tensors(held.values, held.name in hidden).items():
                size = shapes[held.name]
                size = {"row_var": size[:-1], "col_var": size[:-2] + size[-1:]}.get(kind, size)
                blocks = blocks_of(whole(held.name, size), held.first, held.first + values.numel())
                shards.append(StateShard(kind, blocks, values.detach().view(-1), held.is_owner))
        steps = [int(state["step"]) for state in self._optimizer.state.values() if "step" in state]
        scale = self._loss_scale.state() if self._loss_scale else None
        return TrainingState(shards, optimizer_step=max(steps, default=0), loss_scale=scale)

    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        """Continue from the step count `optimizer_step` and from fp16's loss scale."""
        if self._loss_scale and loss_scale:
            self._loss_scale.restore(loss_scale)
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(optimizer_step)

    def _tensors(self, parameter: nn.Parameter, is_hidden: bool) -> dict[StateKind, Tensor]:
        """Return the master weight and the state of its optimizer.

        The state is created if no step has created it yet, as in a resumed run.
        """
        state = self._optimizer.state[parameter]
        kinds = OPTIMIZERS[self._run.optimizer].state(tuple(parameter.shape), is_hidden)
        if not state and kinds:
            state |= {kind: parameter.detach().new_zeros(size) for kind, size in kinds.items()}
            state["step"] = torch.zeros((), device=parameter.device)
        tensors: dict[StateKind, Tensor] = {"weight": parameter}
        return tensors | {kind: values for kind, values in state.items() if kind != "step"}
