"""The command that trains a layout of a plan. Loads no torch."""

from typing import Any

from megabench.config import RunConfig
from megabench.cost.job import Candidate
from megabench.models.find import find_model
from megabench.planner.search import Plan, settings_of
from megabench.specs.fp8_check import FP8_SETTINGS


def train_command(plan: Plan, candidate: Candidate) -> str:
    """Return the command that trains a candidate of the plan, to be run on every host."""
    job, topology = plan.job, plan.topology
    shape = job.shape
    is_whole = shape.num_layers == find_model(shape.name).num_layers
    run = RunConfig.parse(
        settings_of(candidate)
        | {"model": shape.name, "seq_length": job.seq_length, "global_batch": job.global_batch}
        | {
            "num_layers": None if is_whole else shape.num_layers,
            "emulate_hosts": len(topology.hosts) if topology.emulated else None,
        }
        | {"grad_dtype": "fp32" if job.bytes_of_gradient == 4 else "bf16", "optimizer": job.optimizer}
        | _precision_settings(plan)
    )
    by_host = [] if topology.emulated else [len(ranks) for ranks in topology.ranks_by_host]
    return run.command(topology.world_size, processes_by_host=by_host, always=("model",))


def _precision_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings of the precision, unless they are the defaults of runs on this device."""
    job, is_cpu = plan.job, plan.topology.hosts[0].device == "cpu"
    settings: dict[str, Any] = {}
    if job.precision != ("fp32" if is_cpu else "bf16"):
        settings["precision"] = job.precision
    if job.has_fp8_products:
        settings |= {name: getattr(job, name) for name in FP8_SETTINGS}
        if job.has_fp8_gradients:
            del settings["fp8_recipe"]
    return settings
