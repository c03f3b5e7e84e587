"""Refuse a run whose weights, gradients and optimizer state cannot fit into memory, before the model is built."""

import torch

from megabench import UserError
from megabench.config import ResolvedConfig
from megabench.cost.job import Candidate, Job
from megabench.cost.profile import GENERIC, shipped_profiles
from megabench.hardware.host_memory import available_host_bytes

# A run is refused only if 95% of its estimated memory exceeds the available memory. For stages with unequal numbers of
# layers, the estimate is too high.
_MARGIN = 0.95


class MemoryCheckError(UserError):
    """Raised if the training state does not fit into the memory of a device or a host."""


def check_memory(run: ResolvedConfig, local_rank: int, local_world_size: int) -> None:
    """Raise MemoryCheckError if the training state of this host's ranks exceeds the memory of a GPU or of the host.

    Activations are not counted, because their estimate may be too high for a run that fits. The formulas are those of
    the planner (`EngineSpec.memory`).
    """
    state, on_host = state_bytes(run, local_world_size)
    if run.device == "cuda":
        _check(run, state, torch.cuda.get_device_properties(local_rank).total_memory, "each GPU")
    else:
        on_host += state * local_world_size
    _check(run, on_host, available_host_bytes(), "this host")


def state_bytes(run: ResolvedConfig, local_world_size: int) -> tuple[float, float]:
    """Return the bytes of weights, gradients and optimizer state of a rank, and the bytes that a host offloads."""
    job = Job(
        run.shape,
        run.seq_length,
        run.global_batch,
        precision=run.precision,
        bytes_of_gradient=4 if run.grad_dtype == "fp32" else 2,
        optimizer=run.optimizer,
    )
    variant = run.spec.variant_of(run.options)
    candidate = Candidate(run.engine, run.layout, run.micro_batch, variant, recompute=run.recompute)
    memory = run.spec.memory(job, candidate, shipped_profiles()[GENERIC])
    state = memory.weights + memory.gradients + memory.optimizer
    return state, run.spec.host_bytes(job, candidate, local_world_size)


def _check(run: ResolvedConfig, needed: float, available: int, where: str) -> None:
    if needed * _MARGIN <= available:
        return
    raise MemoryCheckError(
        f"{run.model} needs about {needed / 1e9:,.0f} GB on {where}, which has {available / 1e9:,.0f} GB; use "
        f"--model llama-tiny, a smaller --num-layers, more hosts, or --skip-memory-check"
    )
