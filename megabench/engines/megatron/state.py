"""The distributed optimizer's state in terms of Hugging Face tensors: fp32 masters and Adam moments, by rectangles."""

from collections.abc import Iterable, Iterator

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn import Parameter

from megabench.checkpoint.shards import StateShard, blocks_of
from megabench.config import ResolvedConfig
from megabench.engines.megatron.optimizer import copy_number, init_state
from megabench.models.mapping import shard
from megabench.optim.optimizers import StateKind

_KINDS: dict[str, StateKind] = {"param": "weight", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def shards(
    named: Iterable[tuple[str, Parameter]],
    optimizer: DistributedOptimizer,
    run: ResolvedConfig,
    groups: ProcessGroupCollection,
) -> Iterator[StateShard]:
    """Return this rank's optimizer state of each parameter, with names of the whole model."""
    tp_rank, is_first_copy = groups.tp.rank(), copy_number(groups) == 0
    init_state(optimizer.optimizer)  # before the first step, the optimizer has no state
    for name, parameter in named:
        if parameter not in optimizer.model_param_gbuf_map:
            continue  # this data-parallel rank has no part of the parameter
        cut = shard(name, run.shape, run.layout.tp, tp_rank)
        held = optimizer._get_model_param_range_map(parameter)["param"]
        blocks = blocks_of(cut, held.start, held.end)
        # the first tensor-parallel rank saves replicated parameters, and the first stage saves a tied output layer
        is_first = tp_rank == 0 or cut != shard(name, run.shape, run.layout.tp, 0)
        is_owner = is_first and is_first_copy and not getattr(parameter, "shared", False)
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for key, kind in _KINDS.items():
            if key in tensors:
                yield StateShard(kind, blocks, tensors[key].detach().view(-1), is_owner)


def optimizer_step(optimizer: DistributedOptimizer) -> int:
    """The number of optimizer steps, without skipped steps."""
    return max(int(group.get("step", 0)) for group in optimizer.param_groups)


def set_optimizer_step(optimizer: DistributedOptimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["step"] = step


def loss_scale_of(optimizer: DistributedOptimizer) -> dict[str, float] | None:
    """The loss scale of fp16 training, and the counters that change the loss scale; None in other precisions."""
    if optimizer.grad_scaler is None:
        return None
    return {name: float(value) for name, value in optimizer.grad_scaler.state_dict().items()}


def set_loss_scale(optimizer: DistributedOptimizer, state: dict[str, float] | None) -> None:
    if optimizer.grad_scaler is not None and state is not None:
        trackers = {name: int(value) for name, value in state.items() if name != "scale"}
        optimizer.grad_scaler.load_state_dict({"scale": torch.tensor([state["scale"]]), **trackers})
