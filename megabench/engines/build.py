"""Build the engine of a configuration and its process groups."""

import torch
import torch.distributed as dist

from megabench.config import ResolvedConfig
from megabench.engines.base import Engine
from megabench.specs.registry import implementation_of


def process_groups(config: ResolvedConfig) -> dict[str, dist.ProcessGroup]:
    """Return the process groups of the engine on this rank, by parallel axis, without groups of one rank.

    No returned group has communicated before, unless the default group has.
    """
    groups: dict[str, dist.ProcessGroup] = implementation_of(config.engine).process_groups(config)
    return {axis: group for axis, group in groups.items() if group.size() > 1}


def build_engine(config: ResolvedConfig, device: torch.device) -> Engine:
    """Build the engine of `config` with its initial weights. The default process group must be initialized."""
    engine: Engine = implementation_of(config.engine)(config, device)
    return engine
