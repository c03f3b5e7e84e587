"""The content of a plan as JSON, for programs. Loads no torch."""

import json
from dataclasses import fields
from typing import Any

from megabench.cost.fabric_report import describe_fabric
from megabench.planner.costs import Costs, Estimate
from megabench.planner.engines.registry import unplanned_engines
from megabench.planner.explain import estimate_of
from megabench.planner.gains import gains
from megabench.planner.layout_table import Training
from megabench.planner.reasons import GIB, chosen, reason, unmeasured_engines, unmeasured_hardware
from megabench.planner.search import Plan, settings_of
from megabench.planner.train_command import train_command
from megabench.specs.fp8_check import FP8_SETTINGS


def as_json(plan: Plan, top: int, trial: str | None = None, training: Training | None = None) -> str:
    """Return the `top` best estimates as JSON, or one trial. Raises ConfigError if the trial is not a candidate."""
    if trial is None:
        found = describe(plan, top)
        estimate = chosen(plan) if plan.ranked else None
    else:
        estimate = estimate_of(plan, trial)
        found = describe_estimate(estimate)
    return json.dumps(found | describe_training(training, estimate), indent=2)


def describe(plan: Plan, top: int) -> dict[str, Any]:
    """Return the content of the plan as JSON."""
    best = chosen(plan) if plan.ranked else None
    return {
        "model": plan.job.shape.name,
        "world_size": plan.topology.world_size,
        "device": plan.topology.hosts[0].device,
        "seq_length": plan.job.seq_length,
        "global_batch": plan.job.global_batch,
        "precision": plan.job.precision,
        "optimizer": plan.job.optimizer,
        **{name: getattr(plan.job, name) if plan.job.has_fp8_products else None for name in FP8_SETTINGS},
        "profile": {
            "name": plan.profile.name,
            "kind": plan.profile.kind,
            "relative_error": plan.profile.relative_error,
        },
        "num_candidates": plan.num_candidates,
        "num_fitting": plan.num_fitting,
        "usable_gib": plan.usable_bytes / GIB,
        "sweet_spot": best.candidate.name if best else None,
        "reason": reason(plan) if best else None,
        "command": train_command(plan, best.candidate) if best else None,
        "num_equal": plan.equals,
        "merged": plan.merged,
        "ranked": [describe_estimate(estimate) for estimate in plan.ranked[:top]],
        "fallback": _with_command(plan, plan.fallback),
        "risky": [describe_estimate(estimate) for estimate in plan.risky],
        "baselines": [describe_estimate(estimate) for estimate in plan.baselines],
        "misfits": [describe_estimate(estimate) for estimate in plan.misfits],
        "gains": [
            {"flags": one.flags, "ratio": one.ratio, "trial": one.estimate.candidate.name}
            for one in (gains(plan) if best else ())
        ],
        "not_measured": {
            "engines": unmeasured_engines([*plan.ranked[:top], *plan.baselines]),
            "hardware": unmeasured_hardware(plan),
        },
        "assumes_sockets": plan.assumes_sockets,
        "not_covered": unplanned_engines(),
    } | _describe_network(plan)


def _with_command(plan: Plan, estimate: Estimate | None) -> dict[str, Any] | None:
    return describe_estimate(estimate) | {"command": train_command(plan, estimate.candidate)} if estimate else None


def describe_training(training: Training | None, estimate: Estimate | None) -> dict[str, Any]:
    """Return the days and the price of a whole training with a layout, or nothing if they were not asked for."""
    if training is None:
        return {}
    found: dict[str, Any] = {"tokens": training.num_tokens, "days": None}
    if estimate:
        found |= {"days": training.days(estimate.tokens_per_second)}
        price = training.price(estimate.tokens_per_second, estimate.candidate.layout.world_size)
        if price is not None:
            found |= {"price": price}
    return found


def network_slowdown(plan: Plan) -> float | None:
    """Return the recommended layout's step time ÷ that with the expected network, or None if no layout fits."""
    if plan.network is None or not plan.ranked:
        return None
    best = chosen(plan)
    expected = Costs(plan.job, plan.topology, plan.network.expected).estimate(best.candidate)
    return best.step_seconds / expected.step_seconds


def _describe_network(plan: Plan) -> dict[str, Any]:
    """Return the measured network, or nothing without one."""
    if plan.network is None:
        return {}
    found = describe_fabric(plan.network.fabric, plan.network.bandwidths)
    return {"fabric": found | {"slowdown": network_slowdown(plan)}}


def describe_estimate(estimate: Estimate) -> dict[str, Any]:
    """One prediction, for programs."""
    memory = {field.name: getattr(estimate.memory, field.name) / GIB for field in fields(estimate.memory)}
    return {
        "trial": estimate.candidate.name,
        "settings": settings_of(estimate.candidate),
        "step_seconds": estimate.step_seconds,
        "tokens_per_second_per_device": estimate.tokens_per_second_per_device,
        "mfu": estimate.mfu,
        "seconds": estimate.parts,
        "exposed": estimate.exposed,
        "memory_gib": memory | {"total": estimate.memory.total / GIB},
        "fit_chance": estimate.fit_chance,
        "missing_gib": estimate.missing_bytes / GIB,
        "host_gib": estimate.host_bytes / GIB,
    }
