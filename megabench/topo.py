"""`megabench topo`: print hosts, NVLink domains, GPUs and the process groups of a layout as a diagram or as JSON.

This module imports torch only under a launcher.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megabench.config import ConfigError
from megabench.config.clusters import read_cluster
from megabench.cost.fabric import Bandwidth, Fabric
from megabench.cost.fabric_report import SLOW_SHARE, describe_fabric, fabric_sentence, gb_per_s_text, slowest
from megabench.cost.profile import profile_for
from megabench.hardware.facts import read_facts, visible_gpus
from megabench.hardware.topology import Topology, TopologyError, discover, from_facts, split
from megabench.parallel.axes import FACTORS
from megabench.parallel.layout import Layout
from megabench.parallel.placement import LINK_NAMES, Placement, Policy, groups_on, host_names, name_list, number_ranges
from megabench.record import Group as RankGroup

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta", "bright_yellow")
_MOST_GROUPS = 8  # largest number of table rows per kind of process group


def read_policy(word: str) -> Policy:
    """Return the placement policy with the given name. Raise ConfigError if the name is unknown."""
    for policy in get_args(Policy):
        if policy == word:
            return policy
    raise ConfigError(f"placement={word} is not known; use one of {', '.join(get_args(Policy))}")


def find_topology(
    cluster: str | None,
    num_processes: int | None,
    layout: Layout,
    is_launched: bool,
    emulate_hosts: int | None,
    gb_per_s: float | None = None,
) -> Topology:
    """Return the topology of `cluster`, or of the current torchrun launch, or of this machine.

    `gb_per_s` is the bandwidth of each emulated host, if it is limited.
    """
    if cluster:
        topology = read_cluster(cluster)
    elif is_launched:
        topology = _of_launch()
    else:
        topology = _of_machine(num_processes, layout)
    return split(topology, emulate_hosts, gb_per_s) if emulate_hosts else topology


def write(placement: Placement, layout: Layout, as_json: bool, fabric: Fabric | None = None) -> None:
    """Print the diagram or the JSON on standard output, with the measured network if it is given."""
    topology, bandwidths = placement.topology, []
    if fabric:
        bandwidths = fabric.bandwidths(profile_for(topology.hosts[0].device), topology)
    if as_json:
        measured = {"fabric": describe_fabric(fabric, bandwidths)} if fabric else {}
        print(json.dumps(describe(placement, layout) | measured, indent=2))
        return
    console = Console()
    show(console, placement, layout)
    if fabric:
        _show_fabric(console, fabric, bandwidths, topology)


def _show_fabric(console: Console, fabric: Fabric, bandwidths: Sequence[Bandwidth], topology: Topology) -> None:
    """Print the measured and the expected bandwidth of each kind of collective, and whether the network is slow."""
    table = Table("largest collective", "MB", "bus bandwidth", "expected", "share", box=box.MARKDOWN)
    for one in bandwidths:
        rates = [gb_per_s_text(rate) for rate in (one.measured, one.expected)]
        table.add_row(one.collective.label, f"{one.collective.num_bytes / 1e6:,.0f}", *rates, f"{one.share:.0%}")
    console.print(table)
    is_slow = slowest(bandwidths).share < SLOW_SHARE
    text = fabric_sentence(fabric, bandwidths, topology)
    console.print(Text(f"{'WARNING: ' * is_slow}{text}", style="bold red" if is_slow else ""), soft_wrap=True)


def _of_machine(num_processes: int | None, layout: Layout) -> Topology:
    """Return the topology of this machine.

    The default of `num_processes` is one rank per GPU, or tp × cp × pp ranks on a machine without GPUs.
    """
    gpus = visible_gpus()
    size = num_processes or len(gpus) or layout.tp * layout.cp * layout.pp
    if gpus and size > len(gpus):
        raise TopologyError(
            f"--nproc {size} exceeds this machine's {len(gpus)} GPUs. Use --nproc {len(gpus)} or --cluster."
        )
    uuids: Sequence[str | None] = [uuid for uuid, _ in gpus[:size]] or [None] * size
    return from_facts([read_facts(rank, uuid) for rank, uuid in enumerate(uuids)])


def _of_launch() -> Topology:
    """Return the topology of the current launch. This function is collective over all processes of the launch."""
    from megabench.runtime.messages import outlast
    from megabench.runtime.rendezvous import join

    here, gpus = join(), visible_gpus()
    uuid = gpus[here.gpu][0] if here.gpu < len(gpus) else None
    topology = discover(here.store, read_facts(here.local_rank, uuid), here.rank, here.world_size)
    outlast(here.store, here.rank, here.world_size, "topology")
    return topology


def describe(placement: Placement, layout: Layout, groups: Sequence[RankGroup] | None = None) -> dict[str, Any]:
    """Return hosts, NVLink domains, links, process groups, placement and warnings for JSON output.

    Ranks are numbered as in the run, not as in the launcher. `groups` are the process groups with the
    transports of a run; by default, they follow from the placement.
    """
    topology = placement.topology
    if groups is None:
        groups = groups_on(layout, topology)
    return {
        "hosts": [
            {
                "name": host.name,
                "device": host.device,
                "ranks": sorted(ranks),
                "network": host.network,
                "network_gbits": host.network_gbits,
                "server": host.server,
            }
            for host, ranks in zip(topology.hosts, topology.ranks_by_host, strict=True)
        ],
        "domains": [
            {"ranks": ranks, "link": _inner_link(topology, ranks), "hosts": host_names(topology, ranks)}
            for ranks in topology.ranks_by_domain
        ],
        "links": [
            {"kind": kind, "num_pairs": count, "gb_per_s": _gb_per_s(topology, kind)}
            for kind, count in topology.count_links().items()
        ],
        "groups": [
            {"kind": group.kind, "ranks": group.ranks, "link": group.link}
            | ({"transport": group.transport} if group.transport else {})
            for group in groups
        ],
        "placement": {
            "policy": placement.policy,
            "launcher_ranks": list(placement.launcher_ranks),
            "emulated": topology.emulated,
        },
        "warnings": list(placement.warnings),
    }


def show(console: Console, placement: Placement, layout: Layout, groups: Sequence[RankGroup] | None = None) -> None:
    """Print the diagram, the tables of links and process groups, and the warnings.

    `groups` are the process groups with the transports of a run; by default, they follow from the placement.
    """
    topology = placement.topology
    count = f"{topology.hosts_in_words}{', emulated' * topology.emulated}"
    console.print(Text(f"{layout} on {topology.world_size} ranks, {count}, placement {placement.policy}", style="bold"))
    for line in _shared_servers(topology):
        console.print(Text(line), soft_wrap=True)
    for number in sorted(range(len(topology.hosts)), key=lambda host: min(topology.ranks_by_host[host])):
        console.print(_host_panel(placement, layout, number))
        for line in _arrows(topology, layout, number):
            console.print(Text(line), soft_wrap=True)
    if layout.tp > 1:
        console.print(Text("GPUs with the same colour and letter form one tensor-parallel group.", style="dim"))
    console.print(_links_table(topology))
    if groups := groups_on(layout, topology) if groups is None else groups:
        console.print(_groups_table(topology, groups))
    for warning in placement.warnings:
        console.print(Text(f"WARNING: {warning}", style="bold red"), soft_wrap=True)


def _shared_servers(topology: Topology) -> Iterator[str]:
    """Yield a line for each server with several hosts."""
    for numbers in topology.hosts_by_server.values():
        hosts = [topology.hosts[number] for number in numbers]
        if len(hosts) > 1:
            names = name_list([host.name for host in hosts])
            apart = "" if hosts[0].device == "cpu" else ", and no NVLink connects them"
            yield f"{hosts[0].server}: {names} share its memory, CPUs and NICs{apart}."


def _host_panel(placement: Placement, layout: Layout, number: int) -> RenderableType:
    topology = placement.topology
    host, ranks = topology.hosts[number], topology.ranks_by_host[number]
    parts: list[RenderableType] = []
    for domain, members in enumerate(topology.ranks_by_domain):
        here = [rank for rank in members if topology.host_of[rank] == number]
        if here:
            if len(members) > 1 or len(ranks) == 1:
                parts.append(Text(_domain_title(topology, domain, members), style="dim"))
            parts.append(_cells(placement, layout, here))
    rate = f" {host.network_gbits:g} Gbit/s" if host.network_gbits else ""
    title = f"{host.name} · {len(ranks)} × {host.device} · {LINK_NAMES[host.network]}{rate}"
    title += f" of {host.server}" if host.server else ""
    return Panel(Group(*parts), title=Text(title), title_align="left", expand=False)


def _domain_title(topology: Topology, domain: int, members: Sequence[int]) -> str:
    link = _inner_link(topology, members)
    if link is None:
        return "no NVLink to another rank"
    rate = _gb_per_s(topology, link)
    title = f"{LINK_NAMES[link]} domain {domain}" + (f", {rate:g} GB/s a GPU" if rate else "")
    num_hosts = len({topology.host_of[rank] for rank in members})
    return title + (f", {len(members)} GPUs of {num_hosts} hosts" if num_hosts > 1 else "")


def _cells(placement: Placement, layout: Layout, ranks: Sequence[int]) -> RenderableType:
    """Return one cell per rank with the rank, its TP group's letter, and its other coordinates."""
    table = Table.grid(padding=(0, 1))
    cells = []
    for rank in ranks:
        at = layout.coordinates(rank)
        group = (at.pp * layout.data_parallel + at.dp) * layout.cp + at.cp
        lines = [f"{rank}"]
        lines += [f"tp {_letters(group)}"] * (layout.tp > 1)
        others = [axis for axis in FACTORS if axis != "tp" and layout.size(axis) > 1]
        lines += [f"{axis} {getattr(at, axis)}" for axis in others]
        width = max(map(len, lines)) + 2
        colour = _COLOURS[group % len(_COLOURS)] if layout.tp > 1 else "white"
        cells.append(Text("\n".join(line.center(width) for line in lines), style=f"black on {colour}"))
    for start in range(0, len(cells), 8):
        table.add_row(*cells[start : start + 8])
    return table


def _letters(number: int) -> str:
    """Return the letters of a group number in the order A, B, …, Z, AA, AB, …"""
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _arrows(topology: Topology, layout: Layout, number: int) -> Iterator[str]:
    """Yield one line for each pipeline stage on a host and each host that receives the stage's activations."""
    sends: dict[tuple[int, int], list[tuple[int, int]]] = {}
    step = topology.world_size // layout.pp
    for rank in topology.ranks_by_host[number]:
        stage = layout.coordinates(rank).pp
        if stage + 1 < layout.pp:
            sends.setdefault((stage, topology.host_of[rank + step]), []).append((rank, rank + step))
    for (stage, target), pairs in sends.items():
        to = "" if target == number else f" on {topology.hosts[target].name}"
        link = LINK_NAMES[topology.slowest_link(pairs) or "socket"]
        shown = ", ".join(f"{a} → {b}" for a, b in sorted(pairs)[:4]) + ", …" * (len(pairs) > 4)
        yield f"  {'│' if not to else '▼'} stage {stage} → stage {stage + 1}{to} over {link}: {shown}"


def _links_table(topology: Topology) -> Table:
    table = Table("link", "pairs of ranks", "GB/s", "of", box=box.MARKDOWN)
    for kind, count in topology.count_links().items():
        rate = _gb_per_s(topology, kind)
        whose = "a GPU" if kind == "nvlink" else "a server" if topology.shares_servers else "a host"
        table.add_row(LINK_NAMES[kind], f"{count:,}", *((f"{rate:g}", whose) if rate else ("–", "")))
    return table


def _groups_table(topology: Topology, groups: Sequence[RankGroup]) -> Table:
    has_transports = any(group.transport for group in groups)
    columns = ["group", "ranks", "hosts", "slowest link"] + ["NCCL transports"] * has_transports
    table = Table(*columns, box=box.MARKDOWN)
    for kind in dict.fromkeys(group.kind for group in groups):
        same = [group for group in groups if group.kind == kind]
        for group in same[:_MOST_GROUPS]:
            hosts = name_list(host_names(topology, group.ranks))
            cells = [kind, number_ranges(group.ranks), hosts, LINK_NAMES[group.link or "socket"]]
            table.add_row(*cells, *[group.transport or ""] * has_transports)
        if len(same) > _MOST_GROUPS:
            table.add_row(kind, f"and {len(same) - _MOST_GROUPS} more groups (see --json)", "", "")
    return table


def _inner_link(topology: Topology, ranks: Sequence[int]) -> str | None:
    """Return the link between the ranks of an NVLink domain, or None for a single rank."""
    return topology.link(ranks[0], ranks[1]) if len(ranks) > 1 else None


def _gb_per_s(topology: Topology, kind: str) -> float | None:
    """Return the one-way bandwidth of all NVLinks of a GPU or all NICs of a host, or None if unknown."""
    if kind == "nvlink":
        return min((host.nvlink_gb_per_s for host in topology.hosts if host.nvlink_gb_per_s), default=None)
    rates = [host.network_gbits for host in topology.hosts if host.network == kind and host.network_gbits]
    return min(rates) / 8 if rates else None
