"""torchtitan without an accelerator, which it expects. Import this module before torchtitan.

It answers what torchtitan asks about its device, and sums gradients by a reduction that gloo has. What torchtitan
computes stays the same.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from psutil import virtual_memory
from torch.distributed.fsdp import FSDPModule


def _nothing(*_: Any, **__: Any) -> None:
    pass


def sum_gradients(model: torch.nn.Module) -> None:
    """Let FSDP2 sum gradients, as torchtitan does, by a reduction that gloo has."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


_CPU = SimpleNamespace(
    set_device=_nothing,
    current_device=lambda: 0,
    synchronize=_nothing,
    empty_cache=_nothing,
    get_device_name=lambda _: "CPU",
    get_device_properties=lambda _: SimpleNamespace(total_memory=virtual_memory().total),
    memory_stats=lambda _: {},
    reset_peak_memory_stats=_nothing,
)

if not torch.accelerator.is_available():
    with (
        patch("torch._utils._get_available_device_type", lambda: "cpu"),
        patch("torch._utils._get_device_module", lambda _: _CPU),
    ):
        from torchtitan.models.llama3.infra import parallelize
    parallelize.disable_fsdp_gradient_division = sum_gradients
