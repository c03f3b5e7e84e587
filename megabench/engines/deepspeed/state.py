"""ZeRO's training state in terms of Hugging Face tensors: the fp32 master weights and Adam moments of a rank.

Tensor names and blocks do not depend on the world size or the ZeRO stage, so a run with other sizes can load them.
"""

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from megabench.checkpoint.shards import StateShard, TrainingState, blocks_of, whole
from megabench.config import ResolvedConfig
from megabench.models.mapping import hugging_face_shapes
from megabench.optim.optimizers import OPTIMIZERS, StateKind

_MOMENTS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")
# attributes of DeepSpeed's DynamicLossScaler that change during a run
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class ZeroState:
    """The state of a DeepSpeed engine: fp32 under ZeRO 0, any precision under ZeRO 1 to 3."""

    def __init__(self, engine: Any, zero_stage: int, run: ResolvedConfig) -> None:
        self._engine, self._stage, self._run = engine, zero_stage, run

    def read(self) -> TrainingState:
        """This rank's partitions, alive."""
        self._init_moments()
        scaler = self._loss_scaler
        return TrainingState(
            shards=list(self._shards()),
            optimizer_step=int(max(float(state["step"]) for state in self._inner.state.values()))
            if self._has_moments
            else 0,
            loss_scale={name: float(getattr(scaler, name)) for name in _LOSS_SCALE} if scaler else None,
        )

    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        """Update the training weights from restored master weights."""
        for state in self._inner.state.values():
            # DeepSpeed's CPU optimizer stores the step as a number, torch's optimizers store a tensor
            state["step"] = optimizer_step if isinstance(state["step"], int) else state["step"].fill_(optimizer_step)
        if (scaler := self._loss_scaler) and loss_scale:
            for name in _LOSS_SCALE:
                kept = type(getattr(scaler, name))
                setattr(scaler, name, kept(loss_scale[name]))
        if self._stage == 3:
            self._spread_partitions()
        elif self._stage > 0:
            self._engine.optimizer.update_lp_params()

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """torch's optimizer: ZeRO wraps it around flat partitions."""
        optimizer: torch.optim.Optimizer = self._engine.optimizer.optimizer if self._stage else self._engine.optimizer
        return optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of torch's optimizer. ZeRO-3 fills their `params` only during its update."""
        groups = self._inner.param_groups
        if self._stage < 3:
            return groups
        group_of = self._engine.optimizer.sub_group_to_group_id
        return [
            group | {"params": [master for at, master in enumerate(self._masters) if group_of[at] == number]}
            for number, group in enumerate(groups)
        ]

    def compute_weights(self) -> list[StateShard]:
        """Return the weights of the forward pass, of which ZeRO-3 keeps a partition on each rank."""
        shapes = hugging_face_shapes(self._run.shape)
        found = []
        for name, parameter in self._engine.module.named_parameters() if self._stage else ():
            whole_tensor, first, values = whole(name, shapes[name]), 0, parameter.detach()
            if self._stage == 3:
                values = parameter.ds_tensor.detach()
                first = values.numel() * dist.get_rank()
            blocks = blocks_of(whole_tensor, first, first + values.numel())
            found.append(StateShard("weight", blocks, values.view(-1)))
        return found

    @property
    def _has_moments(self) -> bool:
        return OPTIMIZERS[self._run.optimizer].state((1, 1), False).keys() == {*_MOMENTS}

    @property
    def _loss_scaler(self) -> Any:
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        return scaler if hasattr(scaler, "cur_iter") else None

    @property
    def _masters(self) -> list[Tensor]:
        """Return the tensors that torch's optimizer updates."""
        if self._stage == 3:
            masters: list[Tensor] = self._engine.optimizer.fp32_partitioned_groups_flat
        elif self._stage:
            optimizer = self._engine.optimizer  # ZeRO-1 in bf16 uses another optimizer class
            is_bf16 = hasattr(optimizer, "fp32_groups_flat_partition")
            masters = optimizer.fp32_groups_flat_partition if is_bf16 else optimizer.single_partition_of_fp32_groups
        else:
            masters = list(self._engine.module.parameters())
        return masters

    def _init_moments(self) -> None:
        """Create the moments if no step has created them yet, as in a resumed run."""
        for master in self._masters if self._has_moments else ():
            if not (state := self._inner.state[master]):
                counts_in_numbers = isinstance(self._inner, deepspeed.ops.adam.DeepSpeedCPUAdam)
                state["step"] = 0 if counts_in_numbers else torch.zeros((), device=master.device)
                state |= {kind: torch.zeros_like(master, requires_grad=False) for kind in _MOMENTS}

    def _shards(self) -> Iterator[StateShard]:
        shapes = hugging_face_shapes(self._run.shape)
        # without ZeRO, every rank has the whole state
        is_owner = self._stage > 0 or dist.get_rank() == 0
        for name, parameter in self._engine.module.named_parameters():
            if (held := self._held(parameter)) is None:
                continue
            master, offset, first, length = held
            blocks = blocks_of(whole(name, shapes[name]), first, first + length)
            state = self._inner.state[master] if self._has_moments else {}
            for kind, flat in (("weight", master), *state.items()):
                if kind != "step":
                    yield StateShard(kind, blocks, flat.detach().view(-1)[offset : offset + length], is_owner)

    def _held(self, parameter: torch.nn.Parameter) -> tuple[Tensor, int, int, int] | None:
        """Return this rank's part of a parameter: (master, offset in it, first element, number of elements)."""
        if self._stage == 0:
            return parameter, 0, 0, parameter.numel()
        optimizer = self._engine.optimizer
        if self._stage == 3:
            group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            return optimizer.fp32_partitioned_groups_flat[group], offset, length * dist.get_rank(), length
        if (mapping := parameter._hp_mapping) is None:  # type: ignore[attr-defined]
            return None
        master = self._masters[mapping.param_group_index]
        at = mapping.lp_fragment_address
        return master, mapping.hp_fragment_address.start, at.start, at.numel

    def _spread_partitions(self) -> None:
        """Copy the master weights to the partitions of the weights, and to small unpartitioned weights (ZeRO-3)."""
        optimizer = self._engine.optimizer
        kept = optimizer.persistent_parameters
        if kept:
            kept[0].partition(kept)
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if kept:
            kept[0].all_gather(kept)
        optimizer.invalidate_secondary_tensor()  # hpZ's copies are outdated after loading
