"""`megabench plan` with several clusters: compare the best layout of each, and explain the ratios. Loads no torch."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from rich.console import Console
from rich.text import Text

from megabench.config import ConfigError
from megabench.cost.job import Candidate
from megabench.cost.network import ring_bandwidth
from megabench.metrics import token_words
from megabench.parallel.axes import AXIS_BY_NAME
from megabench.planner.costs import Costs, Estimate
from megabench.planner.layout_table import UNMEASURED, Column, Training, print_table, training_columns
from megabench.planner.plan_json import describe, describe_estimate, describe_training
from megabench.planner.reasons import (
    GIB,
    PART_WORDS,
    chosen,
    megatron_note,
    unmeasured_engines,
    unmeasured_hardware,
    unplanned_note,
    why_nothing_fits,
)
from megabench.planner.search import Plan

# Smallest difference of a part to report as a reason, as a fraction of the difference and of the longer of the steps.
_SHARE_OF_DIFFERENCE, _SHARE_OF_STEP = 0.05, 0.01
_LEAST_SHOWN = 0.0005  # seconds that three decimals show; a ratio to less than this is that of a rounding error
_UNLIMITED_GB_PER_S = 1e9


@dataclass(frozen=True)
class ClusterPlan:
    """The plan for one cluster of the command line, and the training run whose days and price are shown."""

    cluster: str
    plan: Plan
    training: Training

    @property
    def best(self) -> Estimate:
        return chosen(self.plan)

    @property
    def num_gpus(self) -> int:
        return self.plan.topology.world_size

    @property
    def speed(self) -> float:
        """Predicted tokens per second of all GPUs."""
        return self.best.tokens_per_second

    @property
    def marks(self) -> list[str]:
        """What was never measured: the hardware, or the engine of the best layout."""
        return [*unmeasured_hardware(self.plan), *(unmeasured_engines([self.best]) if self.plan.ranked else [])]


def make_plans(
    clusters: Sequence[str], trainings: Sequence[Training], make: Callable[[str], Plan]
) -> list[ClusterPlan]:
    """Return the plan of each cluster. Raises ConfigError with the name of the cluster that cannot be planned for."""
    plans = []
    for cluster, training in zip(clusters, trainings, strict=True):
        try:
            plans.append(ClusterPlan(cluster, make(cluster), training))
        except ConfigError as error:
            raise ConfigError(f"--cluster {cluster}: {error}") from None
    return plans


def write(console: Console, plans: Sequence[ClusterPlan]) -> None:
    """Print the fastest cluster, a row for each cluster, and for each slower cluster the main reason."""
    fitting = [plan for plan in plans if plan.plan.ranked]
    if fitting:
        console.print(Text(_headline(fitting), style="bold"))
        console.print()
        print_table(console, _columns(fitting))
    job = plans[0].plan.job
    work = f"{job.shape.name}, sequence {job.seq_length}, global batch {job.global_batch}, {job.precision}"
    days = f"days of training on {token_words(plans[0].training.num_tokens)}"
    console.print(Text(f"{work} · {days}", style="dim"))
    if unmeasured := list(dict.fromkeys(mark for plan in fitting for mark in plan.marks)):
        said = f"{UNMEASURED} never measured: {', '.join(unmeasured)}"
        console.print(Text(said, style="dim"))
    lines = [f"{plan.cluster}: {why_nothing_fits(plan.plan)}" for plan in plans if not plan.plan.ranked]
    fast = max(fitting, key=lambda plan: plan.speed, default=None)
    slower = [_main_reason(fast, plan) for plan in fitting if fast and plan is not fast]
    if slower:
        console.print(Text("\nWhy", style="bold"))
    notes = [megatron_note([plan.best for plan in fitting]), *_batch_notes(plans), unplanned_note()]
    for line in [*slower, *lines, *notes]:
        if line:
            console.print(Text(f"- {line}"), soft_wrap=not console.is_terminal)


def _headline(plans: Sequence[ClusterPlan]) -> str:
    """Return a sentence about the fastest cluster, and the cheapest one if prices are known."""
    by_speed = sorted(plans, key=lambda plan: -plan.speed)
    fast = by_speed[0]
    if len(by_speed) == 1:
        text = f"Only {fast.cluster} can train this"
    else:
        second = by_speed[1]
        text = f"Fastest: {fast.cluster}, {fast.speed / second.speed:.2f} × as fast as {second.cluster}"
    costs = [(plan.training.price(plan.speed, plan.num_gpus), plan.cluster) for plan in plans]
    prices = [(price, cluster) for price, cluster in costs if price is not None]
    return f"{text}. Cheapest: {min(prices)[1]}." if prices else f"{text}."


def _columns(plans: Sequence[ClusterPlan]) -> list[Column]:
    fastest = max(plan.speed for plan in plans)
    return [
        Column("cluster", [plan.cluster + f" {UNMEASURED}" * bool(plan.marks) for plan in plans], True, True),
        Column("layout", [plan.best.candidate.name for plan in plans], True, True),
        Column("tok/s", [f"{plan.speed:,.0f}" for plan in plans], is_kept=True),
        Column("× best", [f"{plan.speed / fastest:.2f}" for plan in plans]),
        *training_columns(
            [plan.training for plan in plans], [plan.speed for plan in plans], [plan.num_gpus for plan in plans]
        ),
        Column("MFU", [f"{100 * plan.best.mfu:.1f}%" for plan in plans]),
        Column("step s", [f"{plan.best.step_seconds:.3f}" for plan in plans]),
        Column("GiB", [f"{plan.best.memory.total / GIB:.1f}" for plan in plans]),
        Column("tok/s/GPU", [f"{plan.best.tokens_per_second_per_device:,.0f}" for plan in plans]),
    ]


def _main_reason(fast: ClusterPlan, slow: ClusterPlan) -> str:
    """Return how much faster the fastest cluster is than another one, and the main reason."""
    ratio = fast.speed / slow.speed
    text = f"{fast.cluster} is {ratio:.2f} × as fast as {slow.cluster}"
    if fast.num_gpus != slow.num_gpus:
        each = fast.best.tokens_per_second_per_device / slow.best.tokens_per_second_per_device
        text += f" ({fast.num_gpus} instead of {slow.num_gpus} GPUs, {each:.2f} × per GPU)"
    error = max(plan.plan.profile.relative_error for plan in (fast, slow))
    if ratio < 1 + error:
        text += f", equal within the prediction error of {100 * error:.0f}%"
    found = reasons(fast, slow)
    return f"{text}: {found[0]}." if found else f"{text}."


def _batch_notes(plans: Sequence[ClusterPlan]) -> list[str]:
    """Return sentences about clusters on which the global batch excludes data parallelism over all GPUs."""
    batch = plans[0].plan.job.global_batch
    common = math.lcm(*(plan.num_gpus for plan in plans))
    return [
        f"The global batch of {batch} is not a multiple of the {plan.num_gpus} GPUs of {plan.cluster}, so ZeRO, FSDP2 "
        f"and DDP are impossible there; --global-batch {math.ceil(batch / common) * common} works on all clusters."
        for plan in plans
        if batch % plan.num_gpus
    ]


def _pairs(plans: Sequence[ClusterPlan]) -> list[tuple[ClusterPlan, ClusterPlan]]:
    """Return all pairs of clusters, the faster cluster of a pair first."""
    by_speed = sorted(plans, key=lambda plan: plan.best.step_seconds)
    return list(combinations(by_speed, 2))


def reasons(fast: ClusterPlan, slow: ClusterPlan) -> list[str]:
    """Return why one cluster is faster, from the parts of the two predicted steps, the largest difference first."""
    here, there = _parts(fast), _parts(slow)
    saved = {name: there.get(name, 0.0) - here.get(name, 0.0) for name in (here | there)}
    least = max(_SHARE_OF_DIFFERENCE * abs(sum(saved.values())), _SHARE_OF_STEP * slow.best.step_seconds)
    found = [
        _reason(name, here.get(name, 0.0), there.get(name, 0.0), fast, slow)
        for name in sorted(saved, key=lambda name: -abs(saved[name]))
        if abs(saved[name]) > least
    ]
    return [*found, *_memory_reasons(fast, slow)]


def _parts(plan: ClusterPlan) -> dict[str, float]:
    """Return the seconds of the parts of a step, with the computing time divided into products and other kernels.

    A prediction with unlimited memory bandwidth gives the time of the products.
    """
    found = plan.plan
    unlimited = found.profile.model_copy(update={"memory_gb_per_s": _UNLIMITED_GB_PER_S})
    products = Costs(found.job, found.topology, unlimited).estimate(plan.best.candidate).parts["compute"]
    parts = dict(plan.best.parts)
    computing = parts.pop("compute")
    return {"products": products, "memory": computing - products, **parts}


def _reason(name: str, here: float, there: float, fast: ClusterPlan, slow: ClusterPlan) -> str:
    words = {**PART_WORDS, "products": "matrix products and attention", "memory": "memory-bound kernels"}
    text = (
        f"{words[name]} {'take' if name in ('products', 'memory') else 'takes'} {here:.3f} s instead of {there:.3f} s"
    )
    text += f" ({here / there:.2f} ×)" if min(here, there) >= _LEAST_SHOWN else ""
    why = _product_rates(here, there, fast, slow) if name == "products" else _constants(name, here < there, fast, slow)
    return f"{text}: {why}" if why else text


def _product_rates(here: float, there: float, fast: ClusterPlan, slow: ClusterPlan) -> str:
    """Return the rates that follow from the predicted seconds of the products, and the peaks."""
    rates, peaks = [], []
    for plan, seconds in ((fast, here), (slow, there)):
        job = plan.plan.job
        rates.append(f"{job.flops_per_token * job.tokens / plan.num_gpus / seconds / 1e12:,.0f}")
        peaks.append(f"{plan.plan.costs.base.peak / 1e12:,.0f}")
    same = peaks[0] == peaks[1]
    of = f"at the same peak of {peaks[0]}" if same else f"at peaks of {peaks[0]} and {peaks[1]}"
    return f"{rates[0]} instead of {rates[1]} TFLOP/s per GPU, {of} TFLOP/s"


def _constants(name: str, is_faster: bool, fast: ClusterPlan, slow: ClusterPlan) -> str | None:
    """Return the constants of the machines that determine a part, or None if they do not explain the difference."""
    both = (fast, slow)
    if name in ("memory", "optimizer"):
        values, unit = [plan.plan.profile.memory_gb_per_s for plan in both], "GB/s of memory bandwidth"
    elif name in AXIS_BY_NAME:
        values, unit = [_ring_gb_per_s(plan, name) for plan in both], "GB/s per GPU in its groups"
    elif name == "launch":
        values, unit = (
            [1e-3 / max(plan.plan.profile.launch_seconds, 1e-9) for plan in both],
            "thousand kernel launches per s",
        )
    else:
        return None
    explains = all(values) and (values[0] > values[1] if is_faster else values[0] < values[1])
    return f"{values[0]:,.0f} instead of {values[1]:,.0f} {unit}" if explains else None


def _ring_gb_per_s(plan: ClusterPlan, axis: str) -> float:
    """Return the bandwidth of a ring of an axis' groups, or 0 if the groups have one rank."""
    geometry = plan.plan.costs.base.geometry_of(plan.best.candidate)
    where = {"tp": geometry.tp, "cp": geometry.cp, "pp": geometry.pp}.get(axis, geometry.replicas)
    return ring_bandwidth(plan.plan.profile, where) / 1e9 if where.inside or where.across else 0.0


def _memory_reasons(fast: ClusterPlan, slow: ClusterPlan) -> list[str]:
    """Return how the memory of a GPU restricts the layouts of the two clusters."""
    found = []
    for plan in (fast, slow):
        candidate = plan.best.candidate
        if candidate.recompute != "none" and (lack := _lack(plan, replace(candidate, recompute="none"))):
            found.append(f"{plan.cluster} needs recomputation: {candidate.name} lacks {lack} without it")
    if fast.num_gpus == slow.num_gpus and (lack := _lack(slow, fast.best.candidate)):
        found.append(f"{fast.best.candidate.name} lacks {lack} on {slow.cluster}")
    return found


def _lack(plan: ClusterPlan, candidate: Candidate) -> str | None:
    """Return the memory that a GPU lacks for a candidate as text, or None if the candidate fits."""
    missing = plan.plan.costs.missing_bytes(candidate)
    return f"{missing / GIB:.1f} GiB per GPU" if missing > 0 else None


def as_json(plans: Sequence[ClusterPlan], top: int) -> str:
    """Return the plans, the durations and the ratios with their reasons as JSON."""
    fitting = [plan for plan in plans if plan.plan.ranked]
    found: dict[str, Any] = {
        "tokens": plans[0].training.num_tokens,
        "clusters": [
            {
                "cluster": plan.cluster,
                "best": describe_estimate(plan.best) if plan.plan.ranked else None,
                "tokens_per_second": plan.speed if plan.plan.ranked else None,
                **describe_training(plan.training, plan.best if plan.plan.ranked else None),
                "plan": describe(plan.plan, top),
            }
            for plan in plans
        ],
        "ratios": [
            {
                "faster": one.cluster,
                "slower": other.cluster,
                "ratio": one.speed / other.speed,
                "reasons": reasons(one, other),
            }
            for one, other in _pairs(fitting)
        ],
        "notes": _batch_notes(plans),
    }
    return json.dumps(found, indent=2, ensure_ascii=False)
