"""Refuse a run whose weights, gradients and optimizer state cannot fit into memory, before the model is built."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megabench.config import ResolvedConfig, RunConfig
from megabench.config.auto import resolve_first
from megabench.cost.job import Candidate, Job
from megabench.cost.profile import GENERIC, shipped_profiles
from megabench.data.text import is_text_file
from megabench.data.tokenizer import BYTES
from megabench.errors import UserError
from megabench.hardware.host_memory import available_host_bytes
from megabench.models.catalog import CATALOG
from megabench.models.find import is_directory
from megabench.parallel.layout import divisors
from megabench.planner.engines.registry import PLANNED_ENGINES

# A run is refused only if 95% of its estimated memory exceeds the available memory. For stages with unequal numbers of
# layers, the estimate is too high.
_MARGIN = 0.95
_RANKS_PER_HOST = 8  # tensor parallelism needs the fast links within a host
_MOST_RANKS = 4096


class MemoryCheckError(UserError):
    """Raised if the training state does not fit into the memory of a device or a host."""


def check_memory(run: ResolvedConfig, given: RunConfig, gpu: int, local_world_size: int) -> str | None:
    """Raise MemoryCheckError if the training state of this host's ranks exceeds the memory of a GPU or of the host.

    The message names other settings, smaller models and numbers of GPUs that fit. `given` is the configuration as the
    user gave it. Activations are not counted, because their estimate may be too high for a run that fits. The formulas
    are those of the planner (`PlannedEngine.memory`). For an engine without them, return a sentence that says so.
    """
    if run.engine not in PLANNED_ENGINES:
        return f"The memory check cannot judge {run.spec.title}, because the planner has no memory model of it."
    of_gpu = torch.cuda.get_device_properties(gpu).total_memory if run.device == "cuda" else None
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
        return None

    def fits(settings: Mapping[str, Any], world_size: int = run.world_size) -> bool:
        changed = _changed(given, settings, world_size, run.device)
        return changed is not None and excess(changed) is None

    ways = _ways_out(run, given, fits)
    last = "or --skip-memory-check" if ways else "--skip-memory-check"
    no_gpu = "no NVIDIA GPU was found here. On the CPU, " if run.device == "cpu" and given.device == "auto" else ""
    raise MemoryCheckError(f"{no_gpu}{run.model} needs about {found}; use {', '.join([*ways, last])}")


# whether the run fits with other settings and, if given, another number of ranks
_Fits = Callable[..., bool]


def _ways_out(run: ResolvedConfig, given: RunConfig, fits: _Fits) -> list[str]:
    """Return what to change so that the run fits. Every setting that is named is accepted with all others."""
    ways = []
    if settings := next(filter(fits, _more_sharding(run, run.world_size)), None):
        ways.append(_flags(settings))
    # a run that starts from given weights keeps its model
    if not is_directory(run.model) and not run.load:
        if (num_layers := _largest(run, fits)) is not None:
            ways.append(f"--num-layers {num_layers}")
        without = {"num_layers": None} if given.num_layers else {}
        models = [name for name in CATALOG if _reads_data(run, name) and fits({"model": name, **without})]
        if models:
            ways.append(f"a --model that fits{' without --num-layers' * bool(without)} ({', '.join(models)})")
    if ranks := _enough_ranks(run, fits):
        ways.append(ranks)
    return ways


def _more_sharding(run: ResolvedConfig, world_size: int) -> Iterator[dict[str, Any]]:
    """Yield settings that divide the same training state among more of `world_size` ranks, or move it to the host."""
    if {"tp", "pp"} <= run.spec.axes:
        for size in divisors(world_size):
            yield from ({"tp": tp, "pp": size // tp} for tp in reversed(divisors(size, _RANKS_PER_HOST)))
    if "zero_stage" in run.options:
        yield {"zero_stage": 3}
    if "offload" in run.options:
        yield from ({"offload": offload} for offload in ("optimizer", "all"))
    if {"offload", "zero_stage"} <= run.options.keys():
        yield {"zero_stage": 3, "offload": "all"}
    yield from (
        {"engine": name}
        for name, engine in PLANNED_ENGINES.items()
        if engine.spec.sharding_stage == 3 and name != run.engine
    )


def _enough_ranks(run: ResolvedConfig, fits: _Fits) -> str | None:
    """Name a number of GPUs or hosts with which the run fits, or return None if there is none."""
    world_size = run.world_size
    while world_size < _MOST_RANKS:
        world_size *= 2
        for settings in ({}, *_more_sharding(run, world_size)):
            if fits(settings, world_size):
                ranks = f"more hosts ({world_size} processes)" if run.device == "cpu" else f"{world_size} GPUs"
                return f"{ranks}{f' with {_flags(settings)}' if settings else ''}"
    return None


def _flags(settings: Mapping[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())


def _largest(run: ResolvedConfig, fits: _Fits) -> int | None:
    """Return the largest number of layers with which `run` fits, or None if it fits with none."""
    fewer = range(run.layout.pp * run.layout.vp, run.shape.num_layers)
    num_fitting = bisect_left(fewer, True, key=lambda size: not fits({"num_layers": size}))
    return fewer[num_fitting - 1] if num_fitting else None


def _reads_data(run: ResolvedConfig, name: str) -> bool:
    """Return whether the vocabulary of a catalogue model contains the tokens of the run's data."""
    is_bytes = run.tokenizer in (None, BYTES) and (run.data == "stdlib" or is_text_file(Path(run.data)))
    return run.data == "synthetic" or is_bytes or CATALOG[name].vocab_size >= run.shape.vocab_size


def _changed(
    given: RunConfig, settings: Mapping[str, Any], world_size: int, device: Literal["cpu", "cuda"]
) -> ResolvedConfig | None:
    """Return the configuration with other settings, or None if it is refused."""
    try:
        return resolve_first(RunConfig.parse({**given.given(), **settings}), world_size, device)
    except UserError:
        return None


def state_bytes(run: ResolvedConfig, local_world_size: int) -> tuple[float, float]:
    """Return the bytes of weights, gradients and optimizer state of a rank, and the bytes that a host offloads.

    The planner must be able to predict the engine.
    """
    engine = PLANNED_ENGINES[run.engine]
    job = Job(
        run.shape,
        run.seq_length,
        run.global_batch,
        precision=run.precision,
        bytes_of_gradient=4 if run.grad_dtype == "fp32" else 2,
        optimizer=run.optimizer,
    )
    variant = engine.variant_of(run.options)
    candidate = Candidate(run.engine, run.layout, run.micro_batch, variant, recompute=run.recompute)
    memory = engine.memory(job, candidate, shipped_profiles()[GENERIC])
    state = memory.weights + memory.gradients + memory.optimizer
    return state, engine.host_bytes(job, candidate, local_world_size)
