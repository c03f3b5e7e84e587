"""The engine that a configuration names, and its process groups."""

import torch
import torch.distributed as dist

from megabench.config import ResolvedConfig
from megabench.engines.protocol import Engine
from megabench.specs.registry import implementation_of


def process_groups(config: ResolvedConfig) -> dict[str, dist.ProcessGroup]:
    """The process groups that the engine of `config` will use on this rank, by axis; those of one rank left out.

    None of them has communicated yet, if the default group has not.
    """
    groups: dict[str, dist.ProcessGroup] = implementation_of(config.engine).process_groups(config)
    return {axis: group for axis, group in groups.items() if group.size() > 1}


def build_engine(config: ResolvedConfig, device: torch.device) -> Engine:
    """The engine that `config` names, with its initial weights, on an initialized default process group."""
    engine: Engine = implementation_of(config.engine)(config, device)
    return engine
