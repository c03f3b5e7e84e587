"""megatron-core's distributed optimizer around an AdamW or SGD with apex's interface."""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megabench.config import ResolvedConfig
from megabench.engines.common.optim import (
    GroupStepAdamW,
    GroupStepOptimizer,
    GroupStepSGD,
    apex_adam,
    parameter_groups,
)
from megabench.models.mapping import shard
from megabench.precision import INITIAL_LOSS_SCALE, LOSS_SCALE_HYSTERESIS, LOSS_SCALE_WINDOW


def build_optimizer(
    run: ResolvedConfig,
    chunks: list[DistributedDataParallel],
    named: Iterable[tuple[str, nn.Parameter]],
    groups: ProcessGroupCollection,
) -> distrib_optimizer.DistributedOptimizer:
    """Return the optimizer of this rank, with fp32 master weights and state sharded over dp and cp ranks.

    `named` are the parameters of the chunks, with names of the whole model.
    """
    _accept_group_step()
    config = OptimizerConfig(
        optimizer="adam",  # megatron-core would build an optimizer itself; this one is passed in
        lr=run.lr,
        min_lr=run.min_lr,
        weight_decay=run.weight_decay,
        bf16=run.policy.compute == "bf16",
        fp16=run.policy.compute == "fp16",
        clip_grad=run.clip_grad,
        use_distributed_optimizer=True,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
    )
    optimizer = distrib_optimizer.DistributedOptimizer(
        _inner_optimizer(run, _param_groups(run, named)),
        config,
        _grad_scaler() if run.policy.scales_loss else None,
        init_state,
        model_chunks=chunks,
        per_model_buffers={number: chunk.buffers for number, chunk in enumerate(chunks)},
        data_parallel_group=groups.intra_dp_cp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=groups.mp.rank(),
        distributed_optimizer_instance_id=copy_number(groups),
    )
    optimizer.grad_stats_parallel_group = groups.intra_dist_opt
    optimizer.tp_group = groups.tp
    return optimizer


def copy_number(groups: ProcessGroupCollection) -> int:
    """Return the number of this rank's copy of the optimizer state, from 0."""
    number: int = groups.dp_cp.rank() // groups.intra_dp_cp.size()
    return number


def _param_groups(run: ResolvedConfig, named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Return the groups of parameters, each with the keys that megatron-core expects."""
    # all Hugging Face tensors of a parameter have the same hyper-parameters (specs/megatron.py)
    tensors = ((shard(name, run.shape, 1, 0).pieces[0].name, param, param.ndim) for name, param in named)
    groups = parameter_groups(run, tensors)
    # megatron-core's own checkpoints identify groups by these keys
    keys = ({"wd_mult": float(group["weight_decay"] > 0), "lr_mult": group["lr_scale"]} for group in groups)
    plain = {"is_expert_parallel": False, "is_decoupled_lr": False}
    return [group | own | plain for group, own in zip(groups, keys, strict=True)]


def _accept_group_step() -> None:
    """Declare that the optimizer stores `step` in the parameter group, as apex's optimizers do."""
    distrib_optimizer.Adam = (GroupStepOptimizer, apex_adam() or GroupStepOptimizer)
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True


def _inner_optimizer(run: ResolvedConfig, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if run.optimizer == "sgd":
        return GroupStepSGD(param_groups, lr=run.lr, weight_decay=run.weight_decay)
    assert run.optimizer == "adamw", "specs/megatron.py lists the optimizers"
    adam: Any = apex_adam() if run.device == "cuda" else None
    return (adam or GroupStepAdamW)(
        param_groups, lr=run.lr, betas=run.betas, eps=run.eps, weight_decay=run.weight_decay
    )


def init_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Create the Adam state of every shard, so that a checkpoint can be loaded into it; SGD has none."""
    if isinstance(optimizer, GroupStepSGD):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}


def _grad_scaler() -> DynamicGradScaler:
    return DynamicGradScaler(
        initial_scale=INITIAL_LOSS_SCALE,
        min_scale=1.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=LOSS_SCALE_WINDOW,
        hysteresis=LOSS_SCALE_HYSTERESIS,
    )
