"""Sentences about a plan: why its first layout is recommended, and what a layout lacks. Loads no torch."""

from collections.abc import Sequence

from megabench.cost.memory import LIKELY
from megabench.hardware.gpus import find_instance
from megabench.parallel.axes import AXES
from megabench.planner.costs import Estimate
from megabench.planner.engines.registry import PLANNED_ENGINES, unplanned_engines
from megabench.planner.search import Plan
from megabench.specs.registry import ENGINES

GIB = 2**30
NOTEWORTHY = 0.01  # smallest difference to mention, as a share of a step
_KINDS = {
    "measured": "measured on this kind of GPU",
    "fitted": "fitted to measurements",
    "assumed": "assumed, not measured",
}
# the words for the parts of a step in sentences
PART_WORDS = {
    "compute": "computing",
    "recompute": "recomputing activations",
    "launch": "waiting for the host to launch kernels",
    **{axis.name: axis.traffic for axis in AXES},
    "bubble": "the pipeline bubble",
    "optimizer": "the optimizer",
    "offload": "host memory",
}


def chosen(plan: Plan) -> Estimate:
    """Return the recommended layout: the fastest one that is likely to fit."""
    return plan.ranked[0]


def reason(plan: Plan) -> str:
    """Return at most three sentences: why a layout is recommended, the best of the other kind, and the certainty."""
    which = f"the fastest of {plan.num_fitting:,} layouts that fit" if plan.num_fitting > 1 else "the only one to fit"
    said = [f"It is {which} with a chance of {LIKELY:.0%} or more.", _other_kind(plan), certainty(plan)]
    return " ".join(filter(None, said))


def _other_kind(plan: Plan) -> str:
    """Return a sentence that compares the recommended layout with the best data-parallel, or parallel, one.

    On one GPU, there is no other kind, and the text is empty.
    """
    if plan.topology.world_size == 1:
        return ""
    best = chosen(plan)
    best_is_parallel = is_parallel(best)
    others = [one for one in (*plan.ranked, *plan.baselines) if is_parallel(one) != best_is_parallel]
    other = min(others, key=lambda one: one.step_seconds, default=None)
    if other is None:
        return f"{_no_alternative(plan, best_is_parallel)}."
    kind = "data-parallel" if best_is_parallel else "tensor- or pipeline-parallel"
    start = f"The best {kind} layout, {other.candidate.name}, takes"
    slower = other.step_seconds / best.step_seconds
    if slower < 1 + NOTEWORTHY:
        return f"{start} as long."
    return f"{start} {slower:.2f} × as long, {why(best, other)}."


def certainty(plan: Plan) -> str:
    """Return a sentence about the certainty of the ranking."""
    error = f"prediction error of {plan.profile.relative_error:.0%}"
    if plan.equals > 1:
        return f"Rows marked = differ by less than the {error}: measure them with compare --plan."
    return f"It leads by more than the {error}." if plan.num_fitting > 1 else f"Its step time has a {error}."


def why(fast: Estimate, slow: Estimate) -> str:
    """Return the difference of two steps, and the part on which the slow layout spends the most additional time."""
    loses = {part: slow.parts.get(part, 0.0) - fast.parts.get(part, 0.0) for part in (*slow.parts, *fast.parts)}
    part = max(loses, key=loses.__getitem__)
    total, least = slow.step_seconds - fast.step_seconds, NOTEWORTHY * fast.step_seconds
    longer, rest = f"{duration(total)} longer", total - loses[part]
    if loses[part] <= least:
        return f"{longer}: a little more on every part of a step"
    elsewhere = f", {duration(abs(rest))} {'more' if rest > 0 else 'less'} elsewhere" * (abs(rest) > least)
    return f"{longer}: {duration(loses[part])} more on {PART_WORDS[part]}{elsewhere}"


def duration(seconds: float) -> str:
    """Return a part of a step as text, in seconds or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


def chance_text(estimate: Estimate) -> str:
    """Return the chance that a layout fits, or an empty string if it is 99% or more."""
    chance = int(100 * estimate.fit_chance)
    return "" if chance >= 99 else f"{chance}%" if chance else "<1%"


def is_parallel(estimate: Estimate) -> bool:
    """Return whether tp, cp or pp is above 1. Layouts of megatron-core can also be purely data-parallel."""
    layout = estimate.candidate.layout
    return layout.data_parallel < layout.world_size


def _no_alternative(plan: Plan, best_is_parallel: bool) -> str:
    """Return why no layout of the other kind is ranked."""
    job, world_size = plan.job, plan.topology.world_size
    if best_is_parallel:
        if job.global_batch % world_size:
            return f"ZeRO, FSDP2 and DDP need a global batch that is a multiple of the {world_size} GPUs"
        return "No ZeRO, FSDP2 or DDP fits"
    if not job.shape.table.has_parallel_blocks:
        return f"{job.shape.name} has no tensor- or pipeline-parallel blocks here"
    if not any(engine.has_optimizer(job.optimizer, {}) for engine in ENGINES.values() if not engine.is_data_parallel):
        return f"No engine with tensor or pipeline parallelism has optimizer={job.optimizer}"
    return f"No tensor- or pipeline-parallel layout is among the {len(plan.ranked)} fastest"


def why_nothing_fits(plan: Plan) -> str:
    """Return a sentence about the layout that comes closest to fitting, for a plan without any that fits."""
    nearest = plan.misfits[0]
    return (
        f"no layout of {plan.job.shape.name} fits on this cluster: {nearest.candidate.name} comes closest, with "
        f"{nearest.memory.total / GIB:.1f} GiB per GPU, but a GPU has {plan.usable_bytes / GIB:.1f} usable GiB "
        f"({nearest.missing_bytes / GIB:.1f} GiB are missing), so its chance to fit is {chance_text(nearest)}; use "
        f"more or larger GPUs, or fewer layers."
    )


def origin(plan: Plan) -> str:
    """Return the source of the profile, and a note if it describes other devices."""
    host, devices = plan.topology.hosts[0], plan.profile.devices
    if plan.profile.kind == "measured" and host.device not in devices:
        return f"measured on {' and '.join(devices)}, and NOT on {host.device}"
    return _KINDS[plan.profile.kind]


def unmeasured_hardware(plan: Plan) -> list[str]:
    """Return the instance type of a plan if no run on it was ever measured, or the GPU if its profile is assumed."""
    host = plan.topology.hosts[0]
    instance = find_instance(host.instance_type or "")
    if instance and not instance.is_tested:
        return [instance.name]
    return [host.device] if plan.profile.kind == "assumed" else []


def unmeasured_engines(estimates: Sequence[Estimate]) -> list[str]:
    """Return those engines of the layouts that were never measured on several GPUs."""
    engines = [PLANNED_ENGINES[one.candidate.engine] for one in estimates if one.candidate.layout.world_size > 1]
    names = [f"{engine.spec.title} on several GPUs" for engine in engines if not engine.is_measured]
    return list(dict.fromkeys(names))


def megatron_note(estimates: Sequence[Estimate]) -> str | None:
    """Return how megatron-core's data parallelism differs from DDP, or None if no layout is pure data parallelism."""
    for one in estimates:
        layout = one.candidate.layout
        is_megatron = not ENGINES[one.candidate.engine].is_data_parallel
        if is_megatron and layout.dp == layout.world_size > 1:
            engine = ENGINES["megatron"].title
            return f"{one.candidate.name} is data parallelism of {engine}. Unlike DDP, it shards the optimizer state."
    return None


def unplanned_note() -> str | None:
    """Return which engines no plan covers, or None if plans cover all."""
    titles = [ENGINES[name].title for name in unplanned_engines()]
    return f"Without a cost model, and therefore not in a plan: {', '.join(titles)}." if titles else None
