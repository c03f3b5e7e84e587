"""The state of an engine whose torch optimizer updates plain fp32 tensors, each a range of one parameter's elements."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megabench.checkpoint.blocks import StateShard, TrainingState, blocks_of, whole
from megabench.config import ResolvedConfig
from megabench.models.mapping import hugging_face_shapes


@dataclass(frozen=True)
class Held:
    """A parameter's elements from `first` on, as this rank's optimizer updates them; its owner alone saves them."""

    name: str
    values: nn.Parameter
    first: int
    is_owner: bool


class ReplicaState:
    """Reads and restores the masters and moments of an optimizer."""

    def __init__(self, run: ResolvedConfig, optimizer: torch.optim.Optimizer, held: Sequence[Held]) -> None:
        self._run, self._optimizer, self._held = run, optimizer, held

    def read(self) -> TrainingState:
        """This rank's tensors, alive."""
        shapes = hugging_face_shapes(self._run.shape)
        shards = []
        for held in self._held:
            blocks = blocks_of(whole(held.name, shapes[held.name]), held.first, held.first + held.values.numel())
            for kind, values in self._tensors(held.values).items():
                shards.append(StateShard(kind, blocks, values.detach().view(-1), held.is_owner))  # type: ignore[arg-type]
        steps = [int(state["step"]) for state in self._optimizer.state.values() if "step" in state]
        return TrainingState(shards, optimizer_step=max(steps, default=0))

    def restored(self, optimizer_step: int) -> None:
        """Counts on from `optimizer_step`."""
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(optimizer_step)

    def _tensors(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The master and its moments, which torch makes in the first step: a run that is resumed has it behind it."""
        state = self._optimizer.state[parameter]
        if self._run.optimizer == "adamw" and not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state |= {kind: torch.zeros_like(parameter, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
        return {"weight": parameter} | {kind: values for kind, values in state.items() if kind != "step"}
