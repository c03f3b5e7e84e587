"""`megabench plan`: print the recommended layout, its command, the reason and the fastest layouts. Loads no torch."""

import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from megabench.cost.fabric_report import SLOW_SHARE, fabric_sentence, slowest
from megabench.metrics import token_words
from megabench.parallel.axes import AXES
from megabench.planner.costs import Estimate
from megabench.planner.gains import gains
from megabench.planner.layout_table import UNMEASURED, Training, layout_columns, print_table
from megabench.planner.plan_json import network_slowdown
from megabench.planner.reasons import (
    GIB,
    NOTEWORTHY,
    chance_text,
    chosen,
    is_parallel,
    megatron_note,
    origin,
    reason,
    unmeasured_engines,
    unmeasured_hardware,
    unplanned_note,
    why_nothing_fits,
)
from megabench.planner.search import Plan
from megabench.planner.train_command import train_command

# the options in the names of layouts, and their meanings; N stands for a number
_TAGS = {
    "full": "full recomputation",
    "selective": "selective recomputation",
    "spread-tp": "tp groups across NVLink domains",
    "kept": "keeps gathered weights",
    "shardN": "shards over N GPUs, with replicas of the shards",
    "hpzN": "second copy of the shards per N GPUs",
    "offload-optimizer": "optimizer in host memory",
    "offload-all": "weights and optimizer in host memory",
}
MOST_TOLD = 12  # number of layouts to search even with a smaller --top, so that equally fast ones are counted


def write(console: Console, plan: Plan, top: int, training: Training | None = None) -> None:
    """Print the recommended layout with its command and the reason, then the `top` fastest layouts and the rest.

    With `training`, the tables have the days, and the price if it is known, of a whole training run.
    """
    _say(console, _work(plan), style="dim")
    if not plan.ranked:
        said = why_nothing_fits(plan)
        _say(console, said[0].upper() + said[1:], style="bold")
        _section(console, "Notes", [_almost(plan), *([network_note(plan)] if plan.network else []), *_sources(plan)])
        return
    best = chosen(plan)
    speed = f"{best.tokens_per_second_per_device:,.0f} tok/s per GPU"
    tie = f" ({_tie(plan, min(top, plan.equals))})" if plan.equals > 1 else ""
    _say(console, f"Best predicted layout: {best.candidate.name}, {speed}, {best.mfu:.1%} MFU{tie}", style="bold")
    _command(console, plan, best)
    console.print()
    _say(console, f"Why: {reason(plan)}")
    if plan.network:
        _say(console, network_note(plan))
    shown = plan.ranked[:top]
    _ranking(console, plan, shown, training)
    _fallback(console, plan)
    _section(console, "Faster, but may run out of memory", _risks(plan))
    _section(console, "Faster with another dtype", _gains(plan))
    if baselines := _missing_baselines(plan, shown):
        _head(console, "Best of each engine without tp, cp or pp")
        _layouts(console, [("", one) for one in baselines], training)
        _unmeasured(console, unmeasured_engines(baselines))
    _section(console, "Notes", [*_notes(plan, shown), *_sources(plan)])
    more = f'Parts of a step: --explain "{best.candidate.name}". Your own layout: --layout "tp8 pp2".'
    _say(console, f"{more} More rows: --top {4 * top}.")


def _ranking(console: Console, plan: Plan, shown: Sequence[Estimate], training: Training | None) -> None:
    """Print the table of the fastest layouts, and what its words and marks mean."""
    console.print()
    _layouts(console, [(_rank(plan, number), one) for number, one in enumerate(shown, 1)], training)
    axes = ", ".join(f"{axis.name} {axis.title.removesuffix(' parallel')}" for axis in AXES)
    named = [*shown, *_missing_baselines(plan, shown), *([plan.fallback] if plan.fallback else []), *_risky(plan)]
    options = {re.sub(r"\d+$", "N", word) for one in named for word in one.candidate.name.split()[1:]}
    tags = "".join(f"; {tag}: {meaning}" for tag, meaning in _TAGS.items() if tag in options)
    _say(console, f"{axes}; vp chunks per stage, mb micro-batch{tags}", style="dim")
    if training:
        has_price = training.price_per_gpu_hour is not None
        words = f"days{' and price' * has_price} of training on {token_words(training.num_tokens)}"
        _say(console, f"{words}, without interruptions", style="dim")
    _unmeasured(console, [*unmeasured_hardware(plan), *unmeasured_engines(shown)])


def _work(plan: Plan) -> str:
    """Return the model, the GPUs and the work of a step as one line."""
    job, topology = plan.job, plan.topology
    mark = f" {UNMEASURED}" * bool(unmeasured_hardware(plan))
    where = f"{topology.world_size:,} × {topology.hosts[0].device}{mark}, {topology.hosts_in_words}"
    unusual = f" · {job.precision}" * (job.precision != "bf16") + f" · {job.optimizer}" * (job.optimizer != "adamw")
    return f"{job.shape.name} on {where} · {job.global_batch} × {job.seq_length} tokens a step{unusual}"


def _tie(plan: Plan, num_rows: int) -> str:
    """Return which rows are as fast as the first one."""
    rows = f"rows 1 {'to' if num_rows > 2 else 'and'} {num_rows}" if num_rows > 1 else "it and others"
    return f"{rows} are equal within the prediction error of {plan.profile.relative_error:.0%}"


def _rank(plan: Plan, number: int) -> str:
    return f"{number}{'=' * (number <= plan.equals and plan.equals > 1)}"


def _say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence, wrapped at words in a terminal, and as one line in a file or pipe."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def _head(console: Console, title: str) -> None:
    console.print()
    _say(console, title, style="bold")


def _section(console: Console, title: str, lines: Iterable[str | None]) -> None:
    """Print the lines that exist below a title, or nothing."""
    if given := [line for line in lines if line]:
        _head(console, title)
        for line in given:
            _say(console, f"- {line}")


def _command(console: Console, plan: Plan, estimate: Estimate) -> None:
    """Print a command as one line, so that it can be copied."""
    num_hosts = 1 if plan.topology.emulated else len(plan.topology.hosts)
    console.print()
    if num_hosts > 1:
        _say(console, f"On each of the {num_hosts:,} hosts, with the first one's name for HOST:", style="dim")
    console.print(Text(train_command(plan, estimate.candidate)), soft_wrap=True)


def _layouts(console: Console, rows: Sequence[tuple[str, Estimate]], training: Training | None) -> None:
    print_table(console, layout_columns(rows, training))


def _unmeasured(console: Console, names: Sequence[str]) -> None:
    """Print what the mark in a table or in the first line means, if it is used."""
    if names:
        _say(console, f"{UNMEASURED} never measured: {', '.join(names)}", style="dim")


def _fallback(console: Console, plan: Plan) -> None:
    """Print the layout to run if the recommended one runs out of memory, with its command."""
    best, other = chosen(plan), plan.fallback
    if other is None:
        return
    _head(console, "If it runs out of memory")
    slower = other.step_seconds / best.step_seconds - 1
    memory = f"{other.memory.total / GIB:.1f} instead of {best.memory.total / GIB:.1f} GiB"
    _say(console, f"{other.candidate.name} needs {memory} and is {100 * slower:.0f}% slower.")
    _command(console, plan, other)


def _risky(plan: Plan) -> list[Estimate]:
    """Return the layouts that may not fit and would be noticeably faster."""
    return [one for one in plan.risky if chosen(plan).step_seconds > (1 + NOTEWORTHY) * one.step_seconds]


def _risks(plan: Plan) -> list[str]:
    """Return the layouts that would be noticeably faster, with their chances to fit."""
    best = chosen(plan).step_seconds
    return [
        f"{one.candidate.name}: {100 * (best / one.step_seconds - 1):.0f}% faster, fits with a chance of "
        f"{chance_text(one)}"
        for one in _risky(plan)
    ]


def _gains(plan: Plan) -> list[str]:
    """Return the gains of other dtypes over the recommended layout."""
    best, fitting = chosen(plan).candidate, {one.candidate for one in plan.ranked}
    found = []
    for one in gains(plan):
        candidate = one.estimate.candidate
        layout = "the same layout" if candidate == best else candidate.name
        only = ", which fits only with this dtype" * (candidate not in fitting)
        faster = f"{100 * (one.ratio - 1):.0f}% faster than the best layout above, with {layout}{only}"
        found.append(f"{one.flags}: {faster}; compare the losses")
    return found


def _missing_baselines(plan: Plan, shown: Sequence[Estimate]) -> list[Estimate]:
    """Return the best layout of each data-parallel kind that the table lacks.

    Offload is shown only for stages that do not fit without it. The list is empty if all rows are data-parallel.
    """
    if not any(map(is_parallel, shown)):
        return []
    fitting = {(one.candidate.engine, _stage(one)) for one in plan.baselines if not one.host_bytes}
    needed = [one for one in plan.baselines if not one.host_bytes or (one.candidate.engine, _stage(one)) not in fitting]
    return [one for one in needed if one not in shown]


def _stage(estimate: Estimate) -> object:
    return getattr(estimate.candidate.variant, "zero_stage", None)


def _almost(plan: Plan) -> str:
    """Return the layouts with the least missing memory, for a plan without any that fits."""
    short = ", ".join(
        f"{one.candidate.name} ({one.missing_bytes / GIB:.1f} GiB, {chance_text(one)})" for one in plan.misfits
    )
    return f"Closest layouts, with the missing memory per GPU and the chance to fit: {short}."


def _notes(plan: Plan, shown: Sequence[Estimate]) -> list[str | None]:
    """Return what to know of the layouts before running them."""
    where = "server" if plan.topology.shares_servers else "host"
    hosts = [
        f"{one.candidate.name} needs {one.host_bytes / GIB:,.0f} GiB of memory on each {where}."
        for one in shown
        if one.host_bytes
    ]
    batch, num_gpus = plan.job.global_batch, plan.topology.world_size
    few = (
        f"{batch} sequences are few for {num_gpus:,} GPUs; --global-batch {num_gpus} allows data parallelism over all "
        f"of them."
        if batch < num_gpus
        else None
    )
    return [few, *hosts, megatron_note(shown), unplanned_note()]


def _sources(plan: Plan) -> list[str]:
    """Return what the predictions rest on."""
    known = f"{plan.num_candidates:,} candidates, {plan.num_fitting:,} fit in {plan.usable_bytes / GIB:.1f} GiB"
    lines = [f"{known}; profile {plan.profile.name}: {origin(plan)}."]
    if plan.job.has_fp8_products:
        sources = plan.profile.origin
        lines.append(f"fp8 products: {sources.get('fp8') or sources['*']}.")
    if plan.assumes_sockets:
        lines.append(
            "The cluster file names no network, so sockets were assumed between the hosts; set network: efa or "
            "infiniband if they have it."
        )
    return lines


def network_note(plan: Plan) -> str:
    """Return sentences about the measured network and, if it is slow, its effect on the recommended layout."""
    assert plan.network
    bandwidths, slowdown = plan.network.bandwidths, network_slowdown(plan)
    said = fabric_sentence(plan.network.fabric, bandwidths, plan.topology)
    if slowdown is None or slowest(bandwidths).share >= SLOW_SHARE:
        return said
    return f"{said} It makes a step of the recommended layout {slowdown:.2f} × as long."
