"""Placement: the assignment of launcher ranks to positions in the (pp, dp, cp, tp) grid. Loads no torch.

A layout's rank numbers increase fastest along tp, then cp, dp and pp. A placement is therefore a permutation of the
launcher's ranks: consecutive ranks first fill a tensor-parallel group.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

from megabench.errors import UserError
from megabench.hardware.topology import Topology
from megabench.parallel.layout import Layout, divisors, rank_groups
from megabench.record import Group

Policy = Literal["topology", "launcher", "spread-tp"]


class PlacementError(UserError):
    """Raised for a layout for which strict placement is impossible."""


@dataclass(frozen=True)
class Placement:
    """A permutation of ranks: rank n of the run is the launcher's rank `launcher_ranks[n]`.

    `topology` is indexed by the run's ranks. `warnings` are sentences about groups that use slow links.
    """

    policy: Policy
    launcher_ranks: tuple[int, ...]
    topology: Topology
    warnings: tuple[str, ...]

    def rank_of(self, launcher_rank: int) -> int:
        return self.launcher_ranks.index(launcher_rank)

    @property
    def hosts_of_ranks(self) -> list[str]:
        """The host name of each rank, by rank."""
        return [self.topology.hosts[number].name for number in self.topology.host_of]


def place(topology: Topology, layout: Layout, policy: Policy = "topology", strict: bool = False) -> Placement:
    """Order the ranks of `topology` (the launcher's ranks) by `policy`.

    - "topology" keeps every TP group in one NVLink domain if any order can, then every CP group. Pipeline stages follow
      the hosts, so that a pipeline crosses hosts as rarely as possible and data-parallel peers stay close.
    - "launcher" keeps the launcher's order.
    - "spread-tp" spreads TP groups across NVLink domains on purpose, for comparison.

    Under "topology" and "spread-tp", the host of the launcher's rank 0 comes first. With `strict`, raise PlacementError
    if a TP group spans several domains.
    """
    order = order_of(topology, layout, policy)
    placed = topology.renumbered(order)
    warnings = []
    if policy != "spread-tp" and (stray := _stray(placed, layout, "tp")):
        warnings.append(f"{_describe(placed, stray, 'TP')}; {_way_out(topology, layout, policy)}")
        if strict:
            raise PlacementError(f"strict_placement: {warnings[0]}")
    if policy != "spread-tp" and (stray := _stray(placed, layout, "cp")):
        warnings.append(_describe(placed, stray, "CP"))
    return Placement(policy, tuple(order), placed, tuple(warnings))


def order_of(topology: Topology, layout: Layout, policy: Policy) -> Sequence[int]:
    """Return the order of the launcher's ranks. The order depends only on tp, cp and the policy."""
    if policy == "launcher":
        return range(topology.world_size)
    if policy == "spread-tp":
        return _dealt_out(topology, _by_place(topology))
    return _packed(topology, layout, _by_place(topology))


def _by_place(topology: Topology) -> list[int]:
    """Return all ranks, sorted by node, by host and by seat on the host. The node and the host of rank 0 come first."""
    nodes, hosts = topology.node_of, topology.host_of
    return sorted(
        range(topology.world_size),
        key=lambda rank: (
            nodes[rank] != nodes[0],
            hosts[rank] != hosts[0],
            nodes[rank],
            hosts[rank],
            topology.seat_of[rank],
        ),
    )


@dataclass(frozen=True)
class _Block:
    """Ranks that stay together. `domain` and `host` are None if the ranks do not share one."""

    ranks: tuple[int, ...]
    domain: int | None
    host: int | None


def _packed(topology: Topology, layout: Layout, ranks: Sequence[int]) -> list[int]:
    blocks = [_Block((rank,), topology.domain_of[rank], topology.host_of[rank]) for rank in ranks]
    for size in (layout.tp, layout.cp):
        blocks = _joined(blocks, size)
    return [rank for block in blocks for rank in block.ranks]


def _joined(blocks: Sequence[_Block], size: int) -> list[_Block]:
    """Join blocks into larger blocks of `size` blocks each, ordered by their first member.

    Blocks are first joined within an NVLink domain, then within a host, then across hosts. Taking as many full groups
    as possible from every domain maximizes the number of groups inside one domain.
    """
    place = {block: number for number, block in enumerate(blocks)}
    left = list(blocks)
    done: list[list[_Block]] = []
    homes: tuple[Callable[[_Block], int | None], ...] = (lambda block: block.domain, lambda block: block.host)
    for home in homes:
        by_home: dict[int | None, list[_Block]] = {}
        for block in left:
            by_home.setdefault(home(block), []).append(block)
        left = by_home.pop(None, [])
        for members in by_home.values():
            whole = len(members) // size * size
            done += [members[start : start + size] for start in range(0, whole, size)]
            left += members[whole:]
    left.sort(key=place.__getitem__)
    done += [left[start : start + size] for start in range(0, len(left), size)]
    return [_merged(members) for members in sorted(done, key=lambda members: place[members[0]])]


def _merged(blocks: Sequence[_Block]) -> _Block:
    domains, hosts = {block.domain for block in blocks}, {block.host for block in blocks}
    return _Block(
        ranks=tuple(rank for block in blocks for rank in block.ranks),
        domain=domains.pop() if len(domains) == 1 else None,
        host=hosts.pop() if len(hosts) == 1 else None,
    )


def _dealt_out(topology: Topology, ranks: Sequence[int]) -> list[int]:
    """Take one rank of every domain in turn, so that consecutive ranks are in different domains."""
    turn: dict[int, int] = {}
    keyed = []
    for position, rank in enumerate(ranks):
        domain = topology.domain_of[rank]
        turn[domain] = turn.get(domain, -1) + 1
        keyed.append((turn[domain], position, rank))
    return [rank for _, _, rank in sorted(keyed)]


def _way_out(topology: Topology, layout: Layout, policy: Policy) -> str:
    """Return a hint for keeping the TP groups inside NVLink domains."""
    best = topology.renumbered(_packed(topology, layout, _by_place(topology)))
    if policy == "launcher" and not _stray(best, layout, "tp"):
        return "placement=topology would keep every TP group inside one NVLink domain"
    sizes = [len(ranks) for ranks in topology.ranks_by_domain]
    if max(sizes) == 1:
        return "no two of these GPUs share an NVLink domain, so only tp=1 needs no slower link"
    model_ranks = layout.cp * layout.pp
    fitting = [
        tp
        for tp in divisors(layout.tp)
        if all(size % tp == 0 for size in sizes) and topology.world_size % (tp * model_ranks) == 0
    ]
    found = f"{sizes[0]} ranks each" if len(set(sizes)) == 1 else f"{', '.join(map(str, sizes))} ranks"
    return f"the NVLink domains have {found}, which tp={fitting[-1]} fits"


def _stray(topology: Topology, layout: Layout, axis: Literal["tp", "cp"]) -> list[list[int]]:
    """Return the groups of an axis that span several domains."""
    groups = rank_groups(layout)[axis]
    return [ranks for ranks in groups if len({topology.domain_of[rank] for rank in ranks}) > 1]


def _describe(topology: Topology, groups: Sequence[Sequence[int]], kind: str) -> str:
    """Describe the first of the groups that span several domains, and count the others."""
    ranks = groups[0]
    link = topology.slowest_link((ranks[0], other) for other in ranks[1:])
    hosts = host_names(topology, ranks)
    where = f"spans hosts {name_list(hosts)}" if len(hosts) > 1 else f"lies in no one NVLink domain of {hosts[0]}"
    rides_on = LINK_NAMES[link or "socket"]
    return f"the {kind} group of ranks {number_ranges(ranks)}{and_more(groups)} {where} and will ride on {rides_on}"


def groups_on(layout: Layout, topology: Topology) -> list[Group]:
    """Return every group of more than one rank, with its slowest link.

    `topology` is indexed by the ranks of the run.
    """
    return [
        Group(kind=axis, ranks=ranks, link=topology.slowest_link(neighbours(axis, ranks)))
        for axis, groups in rank_groups(layout).items()
        for ranks in groups
        if len(ranks) > 1
    ]


def neighbours(axis: str, ranks: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return the pairs of ranks that communicate: adjacent stages of a pipeline, all pairs of other groups."""
    return pairwise(ranks) if axis == "pp" else combinations(ranks, 2)


def host_names(topology: Topology, ranks: Sequence[int]) -> list[str]:
    """Return the names of the hosts of some ranks."""
    return [topology.hosts[number].name for number in sorted({topology.host_of[rank] for rank in ranks})]


def name_list(names: Sequence[str]) -> str:
    """Join names with commas, or abbreviate more than four: "a, …, r (18 hosts)"."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, …, {names[-1]} ({len(names)} hosts)"


def and_more(groups: Sequence[object]) -> str:
    """Return " (and N more)" for the groups after the first, or an empty string."""
    return f" (and {len(groups) - 1} more)" if len(groups) > 1 else ""


def number_ranges(numbers: Sequence[int]) -> str:
    """Abbreviate runs of consecutive numbers: (0, 1, 2, 3, 8) → "0–3, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


LINK_NAMES = {
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "shm": "shared memory",
    "infiniband": "InfiniBand",
    "efa": "EFA",
    "socket": "sockets",
}
