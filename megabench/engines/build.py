"""The engine that a configuration names, and its process groups."""

import torch
import torch.distributed as dist

from megabench.config import ResolvedConfig
from megabench.engines.base import Engine
from megabench.parallel.groups import AXES, Axis


def process_groups(config: ResolvedConfig) -> dict[Axis, dist.ProcessGroup]:
    """The process groups that the engine of `config` will use on this rank, by axis; those of one rank left out.

    None of them has communicated yet, if the default group has not.
    """
    if config.engine == "megatron":
        from megabench.engines.megatron.groups import create

        created = create(config.layout)
        groups = {axis: getattr(created, axis) for axis in AXES}
    else:
        groups = {"dp": dist.group.WORLD}
    return {axis: group for axis, group in groups.items() if group.size() > 1}


def build_engine(config: ResolvedConfig, device: torch.device) -> Engine:
    """The engine that `config` names, with its initial weights, on an initialized default process group."""
    if config.engine == "megatron":
        from megabench.engines.megatron.engine import MegatronEngine

        return MegatronEngine(config, device)
    if config.engine == "fsdp":
        from megabench.engines.fsdp.engine import FsdpEngine

        return FsdpEngine(config, device)
    if config.engine == "ddp":
        from megabench.engines.ddp.engine import DdpEngine

        return DdpEngine(config, device)
    from megabench.engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(config, device)
