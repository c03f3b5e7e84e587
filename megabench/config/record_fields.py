"""Record fields that are known before the run: the identity of the trial, and its settings. Loads no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megabench.config import SETTINGS, ResolvedConfig, RunConfig
from megabench.record import LayoutSizes
from megabench.settings.setting import names


def identity(run: RunConfig, **more: object) -> str:
    """Return the identity of a trial, with which a resumed study finds its existing results.

    The identity is the hash of `more` and of all settings that affect the result, i.e. no output paths and no
    monitoring. Settings without a value are left out, so that a new setting does not change the identity of runs
    without it.
    """
    left_out = {*names(SETTINGS, role="output"), *names(SETTINGS, role="watch")}
    kept = {name: value for name, value in run.flat(mode="json").items() if name not in left_out}
    every = {**kept, **run.spec.recorded(run.options), **more}
    fields = {name: value for name, value in every.items() if value is not None}
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


def auto_fields(given: RunConfig) -> dict[str, Any]:
    """Return the record fields about "auto" settings."""
    return {"auto_settings": list(given.auto_settings), "requested_kernels": given.kernels}


def requested_fields(run: ResolvedConfig, given: RunConfig, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the record fields that are known before the run. `env` contains the environment variables of the trial."""
    of_options = {*names(SETTINGS, role="option")}
    options = {name: value for name, value in run.flat().items() if name in of_options}
    return {
        "engine": run.engine,
        "layout": LayoutSizes(**asdict(run.layout)),
        "options": {**options, **run.spec.recorded(options)},
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
