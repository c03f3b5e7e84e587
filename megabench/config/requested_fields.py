"""Record fields that are known before the run. Loads no torch."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megabench.config import SETTINGS, ResolvedConfig, RunConfig
from megabench.record import LayoutSizes
from megabench.settings.setting import names


def auto_fields(given: RunConfig) -> dict[str, Any]:
    """Return the record fields about "auto" settings."""
    return {"auto_settings": list(given.auto_settings), "requested_kernels": given.kernels}


def requested_fields(run: ResolvedConfig, given: RunConfig, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the record fields that are known before the run. `env` contains the environment variables of the trial."""
    return {
        "engine": run.engine,
        "layout": LayoutSizes(**asdict(run.layout)),
        "options": _options(run),
        "optimizer": run.optimizer,
        "world_size": run.world_size,
        "emulated_hosts": run.emulate_hosts,
        "model": run.model,
        "num_parameters": run.shape.num_parameters,
        "seq_length": run.seq_length,
        "micro_batch": run.micro_batch,
        "global_batch": run.global_batch,
        "precision": run.precision,
        "grad_dtype": run.grad_dtype,
        "num_steps": run.steps,
        "warmup_steps": run.warmup_steps,
        "command": given.command(run.world_size, env),
    }


def _options(run: ResolvedConfig) -> dict[str, Any]:
    """Return the engine's settings with role "option"."""
    options = {name: value for name, value in run.flat().items() if name in names(SETTINGS, role="option")}
    return {**options, **run.spec.recorded(options)}
