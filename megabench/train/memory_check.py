"""Refuse a run whose weights, gradients and optimizer state cannot fit into memory, before the model is built."""

from bisect import bisect_left
from collections.abc import Callable

import torch

from megabench import UserError
from megabench.config import ResolvedConfig
from megabench.cost.job import Candidate, Job
from megabench.cost.profile import GENERIC, shipped_profiles
from megabench.hardware.host_memory import available_host_bytes
from megabench.models.catalog import CATALOG
from megabench.parallel.layout import LayoutError

# A run is refused only if 95% of its estimated memory exceeds the available memory. For stages with unequal numbers of
# layers, the estimate is too high.
_MARGIN = 0.95


class MemoryCheckError(UserError):
    """Raised if the training state does not fit into the memory of a device or a host."""


def check_memory(run: ResolvedConfig, local_rank: int, local_world_size: int) -> None:
    """Raise MemoryCheckError if the training state of this host's ranks exceeds the memory of a GPU or of the host.

    The message names smaller models that fit. Activations are not counted, because their estimate may be too high for a
    run that fits. The formulas are those of the planner (`EngineSpec.memory`).
    """
    of_gpu = torch.cuda.get_device_properties(local_rank).total_memory if run.device == "cuda" else None
    of_host = available_host_bytes()

    def excess(run: ResolvedConfig) -> str | None:
        state, on_host = state_bytes(run, local_world_size)
        if of_gpu is None:
            on_host += state * local_world_size
        elif state * _MARGIN > of_gpu:
            return f"{state / 1e9:,.0f} GB on each GPU, which has {of_gpu / 1e9:,.0f} GB"
        if on_host * _MARGIN > of_host:
            return f"{on_host / 1e9:,.0f} GB on this host, which has {of_host / 1e9:,.0f} GB"
        return None

    if not (found := excess(run)):
        return
    models = [name for name in CATALOG if _builds(run, name) and excess(_with_model(run, name)) is None]
    ways_out = []
    if (num_layers := _largest(run, excess)) is not None:
        ways_out.append(f"--num-layers {num_layers}")
    if models:
        without = " without --num-layers" if run.num_layers else ""
        ways_out.append(f"a --model that fits{without} ({', '.join(models)})")
    ways_out.append("more hosts" if of_gpu is None else "more GPUs")
    raise MemoryCheckError(f"{run.model} needs about {found}; use {', '.join(ways_out)}, or --skip-memory-check")


def _largest(run: ResolvedConfig, excess: Callable[[ResolvedConfig], str | None]) -> int | None:
    """Return the largest number of layers with which `run` fits, or None if it fits with none."""
    fewer = range(run.layout.pp * run.layout.vp, run.shape.num_layers)
    num_fitting = bisect_left(
        fewer, True, key=lambda size: excess(run.model_copy(update={"num_layers": size})) is not None
    )
    return fewer[num_fitting - 1] if num_fitting else None


def _with_model(run: ResolvedConfig, name: str) -> ResolvedConfig:
    return run.model_copy(update={"model": name, "num_layers": None})


def _builds(run: ResolvedConfig, name: str) -> bool:
    """Return whether the run's engine and layout can train this model of the catalogue."""
    shape = CATALOG[name]
    try:
        run.layout.check_model(shape, run.layout.sequence_multiple)
    except LayoutError:
        return False
    return shape.table.has_parallel_blocks or not run.spec.needs_blocks


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
