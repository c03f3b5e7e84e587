"""`megabench plan`: print the layouts for a cluster, ranked by prediction, as a table or as JSON. Loads no torch."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megabench import metrics
from megabench.config import ConfigError, RunConfig, near_matches
from megabench.cost.fabric_report import SLOW_SHARE, describe_fabric, fabric_sentence, slowest
from megabench.cost.job import Candidate
from megabench.hardware.gpus import find_instance
from megabench.models.find import find_model
from megabench.parallel.axes import AXES
from megabench.planner.costs import Costs, Estimate
from megabench.planner.engines.registry import unplanned_engines
from megabench.planner.search import COMPLICATIONS, Plan, candidates, complexity, settings_of
from megabench.specs.fp8_check import FP8_SETTINGS
from megabench.specs.registry import ENGINES

_GIB = 2**30
MOST_TOLD = 12  # largest number of equally fast layouts to list, even with a larger --top
_NOTEWORTHY = 0.01  # smallest difference to mention, as a share of a step
_BAR = 48  # number of characters of the longest bar
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


def origin(plan: Plan) -> str:
    """Return the source of the profile, and a note if it describes other devices or if the instance is untested."""
    host, devices = plan.topology.hosts[0], plan.profile.devices
    text = _KINDS[plan.profile.kind]
    if plan.profile.kind == "measured" and host.device not in devices:
        text = f"measured on {' and '.join(devices)}, and NOT on {host.device}"
    instance = find_instance(host.instance_type or "")
    return f"{text} · {instance.name} is untested" if instance and not instance.is_tested else text


def write(console: Console, plan: Plan, top: int, tokens: float | None = None) -> None:
    """Print the `top` fastest layouts, the recommendation and its command, and the layouts that do not fit.

    If `tokens` is given, also print the predicted days of training on so many tokens.
    """
    job, topology = plan.job, plan.topology
    head = f"{job.shape.name} on {topology.world_size} × {topology.hosts[0].device}, {topology.hosts_in_words}"
    head += f" · sequence {job.seq_length}, global batch {job.global_batch}"
    head += f" · {job.precision}" * (job.precision != "bf16") + f" · {job.optimizer}" * (job.optimizer != "adamw")
    console.print(Text(head, style="bold"), soft_wrap=True)
    told = f"{plan.num_candidates:,} candidates, {plan.num_fitting:,} fit in {plan.usable_bytes / _GIB:.1f} GiB"
    console.print(Text(f"{told} · profile {plan.profile.name}: {origin(plan)}", style="dim"), soft_wrap=True)
    if job.has_fp8_products:
        sources = plan.profile.origin
        console.print(Text(f"fp8 products: {sources.get('fp8') or sources['*']}", style="dim"), soft_wrap=True)
    if plan.network:
        console.print(Text(network_note(plan)), soft_wrap=True)
    if plan.ranked:
        console.print(_table(plan, top))
        for note in (_merged_note(plan, top), megatron_note(_shown(plan, top))):
            if note:
                console.print(Text(note), soft_wrap=True)
        console.print(Text(sweet_spot(plan)), soft_wrap=True)
        console.print(Text(certainty(plan)), soft_wrap=True)
        console.print(Text(f"To train it: {command(plan)}"), soft_wrap=True)
        if tokens:
            text = f"Training on {metrics.token_words(tokens)} takes {training_days(plan, tokens):,.1f} days."
            console.print(Text(text), soft_wrap=True)
    for line in [*what_is_missing(plan), unplanned_note()]:
        if line:
            console.print(Text(line), soft_wrap=True)


def network_note(plan: Plan) -> str:
    """Return sentences about the measured network and, if it is slow, its effect on the recommended layout."""
    assert plan.network
    bandwidths, slowdown = plan.network.bandwidths, network_slowdown(plan)
    said = fabric_sentence(plan.network.fabric, bandwidths, plan.topology)
    if slowdown is None or slowest(bandwidths).share >= SLOW_SHARE:
        return said
    return f"{said} It makes a step of the recommended layout {slowdown:.2f} × as long."


def network_slowdown(plan: Plan) -> float | None:
    """Return the recommended layout's step time ÷ that with the expected network, or None if no layout fits."""
    if plan.network is None or not plan.ranked:
        return None
    best = chosen(plan)
    expected = Costs(plan.job, plan.topology, plan.network.expected).estimate(best.candidate)
    return best.step_seconds / expected.step_seconds


def _table(plan: Plan, top: int) -> Table:
    """Return the table of the `top` first layouts.

    Below them are faster layouts that may not fit, and the best layout of each missing data-parallel kind.
    """
    shown = _shown(plan, top)
    is_certain = all(_chance(one) == "" for one in shown)
    heads = ["", "trial", "step s", "tok/s per GPU", "MFU", "GiB", "state", "activations", "rest", "bubble", "exposed"]
    if not is_certain:
        heads.insert(6, "fits")
    table = Table(*heads, box=box.MARKDOWN)
    for column in table.columns[2:-1]:
        column.justify = "right"
    for number, estimate in enumerate(shown, 1):
        rank = f"{number}{'=' * (number <= plan.equals and plan.equals > 1)}"
        memory, same = estimate.memory, len(plan.merged.get(estimate.candidate.name, ()))
        state = memory.weights + memory.gradients + memory.optimizer
        table.add_row(
            rank if number <= min(top, len(plan.ranked)) else "",
            f"{estimate.candidate.name}{f' (+{same} cp)' * (same > 0)}",
            f"{estimate.step_seconds:.3f}",
            f"{estimate.tokens_per_second_per_device:,.0f}",
            f"{100 * estimate.mfu:.1f}%",
            f"{memory.total / _GIB:.1f}",
            *([] if is_certain else [_chance(estimate)]),
            f"{state / _GIB:.1f}",
            f"{memory.activations / _GIB:.1f}",
            f"{(memory.total - state - memory.activations) / _GIB:.1f}",
            f"{100 * estimate.parts.get('bubble', 0.0) / estimate.step_seconds:.1f}%",
            _exposed(estimate),
        )
    return table


def _shown(plan: Plan, top: int) -> list[Estimate]:
    """Return the layouts in the table."""
    best = plan.ranked[:top]
    return best + plan.risky + [one for one in plan.baselines if one not in best]


def _chance(estimate: Estimate) -> str:
    """Return the chance that a layout fits, or an empty string if it is 99% or more."""
    chance = round(100 * estimate.fit_chance)
    return "" if chance >= 99 else f"{chance}%" if chance else "<1%"


def _merged_note(plan: Plan, top: int) -> str | None:
    """Return what "(+N cp)" means, or None if the table does not contain it."""
    names = [one.candidate.name for one in plan.ranked[:top] if one.candidate.name in plan.merged]
    if not names:
        return None
    return f"(+N cp): N variants with another cp are equally fast, e.g. {plan.merged[names[0]][0]}."


def megatron_note(estimates: Sequence[Estimate]) -> str | None:
    """Return how megatron-core's data parallelism differs from DDP, or None if no layout is pure data parallelism."""
    names = [
        one.candidate.name
        for one in estimates
        if _is_parallel(one) and one.candidate.layout.dp == one.candidate.layout.world_size
    ]
    if not names:
        return None
    engine = ENGINES["megatron"].title
    return f"{names[0]} is data parallelism of {engine}, which shards the optimizer state; DDP (ddp) does not."


def _exposed(estimate: Estimate) -> str:
    """Return the exposed communication by group, as shares of the step."""
    shares = {axis: seconds / estimate.step_seconds for axis, seconds in estimate.exposed.items()}
    return " ".join(f"{axis} {100 * share:.1f}%" for axis, share in shares.items() if share >= 0.0005) or "–"


def chosen(plan: Plan) -> Estimate:
    """Return the recommended layout: the simplest of those that are about as fast as the fastest."""
    return plan.ranked[0]


def tokens_per_second(plan: Plan) -> float:
    """Return the predicted throughput of all GPUs with the recommended layout."""
    return chosen(plan).tokens_per_second_per_device * plan.topology.world_size


def training_days(plan: Plan, tokens: float) -> float:
    """Return the predicted days of training with the recommended layout."""
    return metrics.training_days(tokens_per_second(plan), tokens)


def sweet_spot(plan: Plan) -> str:
    """Return sentences with the recommended layout, why it is preferred, and the best layout of the other kind."""
    best = chosen(plan)
    said = f"Sweet spot: {best.candidate.name}, {best.tokens_per_second_per_device:,.0f} tok/s per GPU"
    sentences = [f"{said}, {_preference(plan)}.", *_risks(plan)]
    is_parallel = _is_parallel(best)
    kind = "data-parallel" if is_parallel else "parallel"
    others = plan.baselines if is_parallel else [one for one in plan.ranked if _is_parallel(one)]
    if not others:
        return " ".join([*sentences, f"It has no {kind} alternative: {_no_alternative(plan, is_parallel)}."])
    other = others[0]
    start = f"The best {kind} alternative, {other.candidate.name},"
    slower = other.step_seconds / best.step_seconds - 1
    if abs(slower) < _NOTEWORTHY:
        sentences.append(f"{start} takes as long.")
    elif slower < 0:
        sentences.append(f"{start} is predicted to be {-100 * slower:.0f}% faster, less than the model's error.")
    else:
        sentences.append(f"{start} takes {1 + slower:.2f} × as long: {_why(best, other)}.")
    return " ".join(sentences)


def _preference(plan: Plan) -> str:
    """Return why the recommended layout is preferred to the fastest one."""
    best, fastest = chosen(plan), plan.fastest
    assert fastest
    if best.candidate == fastest.candidate:
        return "the fastest layout that is likely to fit" if plan.num_fitting > 1 else "the only layout likely to fit"
    more = [complexity(one.candidate, plan.job) for one in (best, fastest)]
    what = next((name for name, a, b in zip(COMPLICATIONS, *more, strict=True) if a < b), None)
    less = f"with {'less' if what in ('host memory', 'recomputation') else 'fewer'} {what}"
    less = less if what else f"with a better chance to fit ({_chance(best) or '99% or more'})"
    slower = 100 * (best.step_seconds / fastest.step_seconds - 1)
    return (
        f"{less} than {fastest.candidate.name} and {slower:.1f}% slower, which is less than the model's error of "
        f"{100 * plan.profile.relative_error:.0f}%"
    )


def _risks(plan: Plan) -> list[str]:
    """Return a sentence about the fastest layout that may not fit, if it is noticeably faster."""
    best = chosen(plan)
    for one in plan.risky[:1]:
        gain = best.step_seconds / one.step_seconds - 1
        if gain >= _NOTEWORTHY:
            return [f"{one.candidate.name} would be {100 * gain:.0f}% faster, but its chance to fit is {_chance(one)}."]
    return []


def _why(best: Estimate, other: Estimate) -> str:
    """Return the parts of a step on which the other layout spends the most time more, and less."""
    loses = {part: other.parts.get(part, 0.0) - best.parts.get(part, 0.0) for part in (*other.parts, *best.parts)}
    found = []
    for part, word in ((max(loses, key=loses.__getitem__), "more"), (min(loses, key=loses.__getitem__), "less")):
        seconds = loses[part] if word == "more" else -loses[part]
        if seconds > _NOTEWORTHY * best.step_seconds:
            duration = f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"
            found.append(f"{duration} {word} of a step on {PART_WORDS[part]}")
    return f"it spends {' and '.join(found)}" if found else "it spends a little more on every part of a step"


def _is_parallel(estimate: Estimate) -> bool:
    """Return whether the candidate's engine has other parallel axes than dp."""
    return not ENGINES[estimate.candidate.engine].is_data_parallel


def _no_alternative(plan: Plan, is_parallel: bool) -> str:
    """Return why no layout of the other kind is ranked."""
    job, world_size = plan.job, plan.topology.world_size
    if is_parallel:
        if job.global_batch % world_size:
            return f"ZeRO, FSDP2 and DDP need a global batch that is a multiple of the {world_size} GPUs"
        return "no ZeRO, FSDP2 or DDP fits"
    if not job.shape.table.has_parallel_blocks:
        return f"{job.shape.name} has no tensor- or pipeline-parallel blocks here"
    if not any(engine.has_optimizer(job.optimizer, {}) for engine in ENGINES.values() if not engine.is_data_parallel):
        return f"no engine with tensor or pipeline parallelism has optimizer={job.optimizer}"
    return "no tensor- or pipeline-parallel layout fits"


def command(plan: Plan) -> str:
    """Return the command that trains the recommended layout, to be run on every host."""
    job, topology = plan.job, plan.topology
    shape, hosts = job.shape, len(topology.hosts)
    is_whole = shape.num_layers == find_model(shape.name).num_layers
    run = RunConfig.parse(
        settings_of(chosen(plan).candidate)
        | {"model": shape.name, "seq_length": job.seq_length, "global_batch": job.global_batch}
        | {"num_layers": None if is_whole else shape.num_layers, "emulate_hosts": hosts if topology.emulated else None}
        | {"grad_dtype": "fp32" if job.bytes_of_gradient == 4 else "bf16", "optimizer": job.optimizer}
        | _precision_settings(plan)
    )
    if hosts == 1 or topology.emulated:
        return run.command(topology.world_size)
    sizes = {len(ranks) for ranks in topology.ranks_by_host}
    where = ["--nnodes", str(hosts), "--nproc-per-node", str(sizes.pop()) if len(sizes) == 1 else "gpu"]
    where += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    return shlex.join(["torchrun", *where, "-m", "megabench.train", *run.flags()])


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


def certainty(plan: Plan) -> str:
    """Return a sentence about the certainty of the ranking."""
    error = f"{100 * plan.profile.relative_error:.0f}%"
    if plan.equals > 1:
        more = ", and perhaps more," if plan.equals == len(plan.ranked) < plan.num_fitting else ""
        count = f"The first {plan.equals}{more} are equal"
        return f"{count} within the model's error of {error}. Measure them to find the fastest."
    if plan.num_fitting == 1:
        return f"The model's error is {error}."
    return f"The first layout is faster than all other families of layouts by more than the model's error of {error}."


def unplanned_note() -> str | None:
    """Return which engines no plan covers, or None if plans cover all."""
    titles = [ENGINES[name].title for name in unplanned_engines()]
    return f"Without a cost model, and therefore not in a plan: {', '.join(titles)}." if titles else None


def what_is_missing(plan: Plan) -> list[str]:
    """Return sentences about the host memory that layouts with offload need, and about layouts that almost fit."""
    lines = []
    if not plan.ranked:
        nearest = plan.misfits[0]
        lines.append(
            f"no layout of {plan.job.shape.name} fits on this cluster: {nearest.candidate.name} comes closest, with "
            f"{nearest.memory.total / _GIB:.1f} GiB per GPU, but a GPU has {plan.usable_bytes / _GIB:.1f} usable GiB "
            f"({nearest.missing_bytes / _GIB:.1f} GiB are missing), so its chance to fit is {_chance(nearest)}; use "
            f"more or larger GPUs, or fewer layers."
        )
    else:
        where = "server" if plan.topology.shares_servers else "host"
        lines += [
            f"{one.candidate.name} needs {one.host_bytes / _GIB:,.0f} GiB of memory on each {where}."
            for one in plan.ranked[:3]
            if one.host_bytes
        ]
    if plan.misfits:
        short = ", ".join(
            f"{one.candidate.name} ({one.missing_bytes / _GIB:.1f} GiB, {_chance(one)})" for one in plan.misfits
        )
        lines.append(f"These layouts almost fit; missing memory per GPU, and the chance to fit: {short}.")
    return lines


def explain(console: Console, plan: Plan, trial: str) -> None:
    """Print the time of each part of a trial's step as bars. Raises ConfigError if the trial is not a candidate."""
    estimate = estimate_of(plan, trial)
    chance = f"; its chance to fit is {_chance(estimate)}" if _chance(estimate) else ""
    lacks = f"; lacks {estimate.missing_bytes / _GIB:.1f} GiB per GPU" if not estimate.fits else ""
    title = f"{estimate.candidate.name}: {estimate.step_seconds:.3f} s a step{lacks}{chance}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    _bars(console, estimate.parts, "s")
    console.print(Text(f"memory of the fullest GPU: {estimate.memory.total / _GIB:.1f} GiB", style="bold"))
    memory = {field.name: getattr(estimate.memory, field.name) / _GIB for field in fields(estimate.memory)}
    _bars(console, memory, "GiB")


def _bars(console: Console, parts: dict[str, float], unit: str) -> None:
    total, longest = sum(parts.values()), max(parts.values())
    for name, value in parts.items():
        if value > total / 1e4:
            bar = "█" * max(1, round(_BAR * value / longest))
            console.print(Text(f"{name:>11} {value:9.3f} {unit} {100 * value / total:5.1f}%  {bar}"), soft_wrap=True)


def estimate_of(plan: Plan, trial: str) -> Estimate:
    """Return the estimate of the trial with this name. Raises ConfigError if the trial is not a candidate."""
    return Costs(plan.job, plan.topology, plan.profile).estimate(find_trial(plan, trial))


def find_trial(plan: Plan, trial: str) -> Candidate:
    """Return the candidate with this name. The words of the name may be separated by any characters.

    Raises ConfigError if there is no such candidate.
    """
    by_key = {_key(candidate.name): candidate for candidate in candidates(plan.job, plan.topology)}
    if _key(trial) in by_key:
        return by_key[_key(trial)]
    names = [candidate.name for candidate in by_key.values()]
    shown = [estimate.candidate.name for estimate in plan.ranked + plan.baselines]
    near = near_matches(trial, names, otherwise=f"e.g. {', '.join(shown[:3])}")
    raise ConfigError(f"trial {trial!r} is not a predicted trial; {near}")


def _key(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name.lower()).strip()


def describe(plan: Plan, top: int) -> dict[str, Any]:
    """Return the content of the plan as JSON."""
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
        "usable_gib": plan.usable_bytes / _GIB,
        "sweet_spot": chosen(plan).candidate.name if plan.ranked else None,
        "reason": sweet_spot(plan) if plan.ranked else None,
        "command": command(plan) if plan.ranked else None,
        "num_equal": plan.equals,
        "fastest": plan.fastest.candidate.name if plan.fastest else None,
        "merged": plan.merged,
        "ranked": [describe_estimate(estimate) for estimate in plan.ranked[:top]],
        "risky": [describe_estimate(estimate) for estimate in plan.risky],
        "baselines": [describe_estimate(estimate) for estimate in plan.baselines],
        "misfits": [describe_estimate(estimate) for estimate in plan.misfits],
        "not_covered": unplanned_engines(),
    } | _describe_network(plan)


def _describe_network(plan: Plan) -> dict[str, Any]:
    """Return the measured network, or nothing without one."""
    if plan.network is None:
        return {}
    found = describe_fabric(plan.network.fabric, plan.network.bandwidths)
    return {"fabric": found | {"slowdown": network_slowdown(plan)}}


def describe_estimate(estimate: Estimate) -> dict[str, Any]:
    """One prediction, for programs."""
    memory = {field.name: getattr(estimate.memory, field.name) / _GIB for field in fields(estimate.memory)}
    return {
        "trial": estimate.candidate.name,
        "settings": settings_of(estimate.candidate),
        "step_seconds": estimate.step_seconds,
        "tokens_per_second_per_device": estimate.tokens_per_second_per_device,
        "mfu": estimate.mfu,
        "seconds": estimate.parts,
        "exposed": estimate.exposed,
        "memory_gib": memory | {"total": estimate.memory.total / _GIB},
        "fit_chance": estimate.fit_chance,
        "missing_gib": estimate.missing_bytes / _GIB,
        "host_gib": estimate.host_bytes / _GIB,
    }


def as_json(plan: Plan, top: int, trial: str | None = None, tokens: float | None = None) -> str:
    """Return the `top` best estimates as JSON, or one trial. Raises ConfigError if the trial is not a candidate."""
    found = describe(plan, top) if trial is None else describe_estimate(estimate_of(plan, trial))
    if tokens:
        found |= {"tokens": tokens, "days": training_days(plan, tokens) if plan.ranked else None}
    return json.dumps(found, indent=2)
