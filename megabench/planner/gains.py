"""What other dtypes would gain: bf16 gradients, and fp8 on GPUs that have it. Loads no torch."""

from dataclasses import dataclass, replace
from typing import Any

from megabench.config import ConfigError
from megabench.cost.job import Job
from megabench.planner.costs import Costs, Estimate
from megabench.planner.search import Plan
from megabench.precision import POLICIES
from megabench.specs.fp8_check import odd_size

_LEAST_GAIN = 1.05


@dataclass(frozen=True)
class Gain:
    """A setting with which another or the same layout is faster than the recommended one. `ratio` is above 1."""

    flags: str
    ratio: float
    estimate: Estimate


def gains(plan: Plan) -> list[Gain]:
    """Return the settings that are predicted to gain more than 5%.

    Only the layouts of the plan and those that almost fit are predicted, so the gain is a lower bound.
    """
    found = [_gain(plan, flags, changes) for flags, changes in _other_settings(plan.job)]
    return [one for one in found if one and one.ratio > _LEAST_GAIN]


def _other_settings(job: Job) -> list[tuple[str, dict[str, Any]]]:
    """Return the flags of other dtypes, and the fields of the job that they change."""
    found: list[tuple[str, dict[str, Any]]] = []
    if job.bytes_of_gradient == 4 and "bf16" in POLICIES[job.precision].grad_dtypes:
        found.append(("--grad-dtype bf16", {"bytes_of_gradient": 2}))
    if job.precision == "bf16":
        found.append(("--precision fp8", {"precision": "fp8"}))
    return found


def _gain(plan: Plan, flags: str, changes: dict[str, Any]) -> Gain | None:
    """Return the gain of a setting, or None if no layout of the plan fits with it or the GPUs do not have it."""
    job = replace(plan.job, **changes)
    try:
        costs = Costs(job, plan.topology, plan.profile)
    except ConfigError:
        return None
    members = [one.candidate for one in (*plan.ranked, *plan.risky, *plan.misfits)]
    if job.has_fp8_products:
        members = [one for one in members if not odd_size(job.shape, one.layout, one.micro_batch, job.seq_length)]
    fitting = [one for one in map(costs.estimate, members) if one.fits]
    best = min(fitting, key=lambda one: one.step_seconds, default=None)
    return Gain(flags, plan.ranked[0].step_seconds / best.step_seconds, best) if best else None
