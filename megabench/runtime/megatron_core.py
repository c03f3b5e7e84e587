"""The differences between the supported versions of megatron-core, and what must happen before its first import.

megatron-core 0.16 is the last version for Python 3.11. Python 3.12 and newer use version 0.19.
"""

import functools
import logging
import warnings
from importlib.metadata import version
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from megabench.runtime import megatron_cpu

_IS_CURRENT = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 19)


def prepare() -> None:
    """Make megatron-core work on this machine, with or without GPUs, and silence its expected warnings.

    Call `prepare` before anything imports megatron.core, in the thread that trains.
    """
    for message in (
        "Transformer Engine and Apex are not installed",
        "Apex is not installed",
        "invalid escape sequence",
        "The .grad attribute of a Tensor that is not a leaf",  # the schedules read .grad of stage outputs
    ):
        warnings.filterwarnings("ignore", message=message)
    # version 0.16 has no HybridModel, which replaces GPTModel
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
        lambda record: "GPTModel IS DEPRECATED" not in record.getMessage()
    )
    megatron_cpu.install()


def mlp_spec(submodules: Any) -> Any:
    """Return the spec of a transformer layer's MLP with the given `MLPSubmodules`."""
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    if _IS_CURRENT:
        return functools.partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def buffer_layout(
    parameters: list[Parameter], bucket_size: int | None, num_shards: int, ddp_config: Any
) -> dict[str, Any]:
    """Return the arguments with which DistributedDataParallel places parameters in its buffers.

    `bucket_size` is the number of parameters per bucket, or None for a single bucket. `num_shards` is the number of
    ranks that share the optimizer state. Version 0.16 computes the layout itself.
    """
    if not _IS_CURRENT:
        return {}
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    layout = DistributedOptimizer.compute_full_param_layout(parameters, bucket_size, num_shards, ddp_config)
    return {"full_param_layout": layout}


def gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """Return the gradients that this rank contributes to the norm: each element of the model on exactly one rank."""
    grads: list[Tensor] = (
        optimizer.get_grads_for_grad_norm() if _IS_CURRENT else optimizer.get_main_grads_for_grad_norm()
    )
    return grads
