"""Placement: which rank sits where in the (pp, dp, cp, tp) grid. Loads no torch.

A layout's ranks count tp fastest, then cp, dp and pp, so a placement is an order of the launcher's ranks: neighbours in
it are neighbours in a tensor-parallel group first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megabench import UserError
from megabench.hardware.topology import Topology
from megabench.parallel.groups import rank_groups
from megabench.parallel.layout import Layout, divisors

Policy = Literal["topology", "launcher", "spread-tp"]


class PlacementError(UserError):
    """A layout that cannot be placed as strictly as was asked for."""


@dataclass(frozen=True)
class Placement:
    """Rank n of the run is the launcher's rank `launcher_ranks[n]`. `topology` goes by the run's ranks.

    `warnings` are sentences about groups that ride on slow links.
    """

    policy: Policy
    launcher_ranks: tuple[int, ...]
    topology: Topology
    warnings: tuple[str, ...]

    def rank_of(self, launcher_rank: int) -> int:
        return self.launcher_ranks.index(launcher_rank)

    @property
    def hosts_of_ranks(self) -> list[str]:
        """The name of each rank's host, by rank."""
        return [self.topology.hosts[number].name for number in self.topology.host_of]


def place(topology: Topology, layout: Layout, policy: Policy = "topology", strict: bool = False) -> Placement:
    """The ranks of `topology` (the launcher's) in the order that `policy` asks for.

    "topology": every TP group in one NVLink domain where any order can do so, then every CP group; stages follow the
    hosts, so a pipeline goes on to another host as seldom as that allows, and data-parallel peers stay close.
    "launcher": as they come. "spread-tp": TP across domains on purpose, for comparison.
    Under the first and the last, the host of the launcher's rank 0 comes first. With `strict`, PlacementError where a
    TP group leaves its domain.
    """
    if policy == "launcher":
        order: Sequence[int] = range(topology.world_size)
    elif policy == "spread-tp":
        order = _dealt_out(topology, _by_place(topology))
    else:
        order = _packed(topology, layout, _by_place(topology))
    placed = topology.renumbered(order)
    warnings = []
    if policy != "spread-tp" and (stray := _stray(placed, layout, "tp")):
        warnings.append(f"{_describe(placed, stray, 'TP')}; {_way_out(topology, layout, policy)}")
        if strict:
            raise PlacementError(f"strict_placement: {warnings[0]}")
    if policy != "spread-tp" and (stray := _stray(placed, layout, "cp")):
        warnings.append(_describe(placed, stray, "CP"))
    return Placement(policy, tuple(order), placed, tuple(warnings))


def _by_place(topology: Topology) -> list[int]:
    """All ranks host by host, in the order of their seats; the host of rank 0 first."""
    first = topology.host_of[0]
    return sorted(
        range(topology.world_size),
        key=lambda rank: (topology.host_of[rank] != first, topology.host_of[rank], topology.seat_of[rank]),
    )


@dataclass(frozen=True)
class _Block:
    """Ranks that sit together; `domain` and `host` are None where they have none in common."""

    ranks: tuple[int, ...]
    domain: int | None
    host: int | None


def _packed(topology: Topology, layout: Layout, ranks: Sequence[int]) -> list[int]:
    blocks = [_Block((rank,), topology.domain_of[rank], topology.host_of[rank]) for rank in ranks]
    for size in (layout.tp, layout.cp):
        blocks = _joined(blocks, size)
    return [rank for block in blocks for rank in block.ranks]


def _joined(blocks: Sequence[_Block], size: int) -> list[_Block]:
    """Blocks of `size` blocks each: as many as possible within a domain, then within a host; in order of their first.

    Taking whole blocks out of every domain is the most that any choice can place inside one.
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
    """One rank of every domain in turn, so that neighbours sit in different ones."""
    turn: dict[int, int] = {}
    keyed = []
    for position, rank in enumerate(ranks):
        domain = topology.domain_of[rank]
        turn[domain] = turn.get(domain, -1) + 1
        keyed.append((turn[domain], position, rank))
    return [rank for _, _, rank in sorted(keyed)]


def _way_out(topology: Topology, layout: Layout, policy: Policy) -> str:
    """What would keep the TP groups inside NVLink domains."""
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
    """The groups of an axis that do not lie in one domain."""
    groups = rank_groups(layout)[axis]
    return [ranks for ranks in groups if len({topology.domain_of[rank] for rank in ranks}) > 1]


def _describe(topology: Topology, groups: Sequence[Sequence[int]], kind: str) -> str:
    """One sentence about the first of some groups that leave their domain, and how many more do."""
    ranks = groups[0]
    link = topology.slowest_link((ranks[0], other) for other in ranks[1:])
    hosts = [topology.hosts[number].name for number in sorted({topology.host_of[rank] for rank in ranks})]
    where = f"spans hosts {', '.join(hosts)}" if len(hosts) > 1 else f"lies in no one NVLink domain of {hosts[0]}"
    rides_on = LINK_NAMES[link or "socket"]
    return f"the {kind} group of ranks {number_ranges(ranks)}{and_more(groups)} {where} and will ride on {rides_on}"


def and_more(groups: Sequence[object]) -> str:
    """How many groups there are beside the first, which a sentence names."""
    return f" (and {len(groups) - 1} more)" if len(groups) > 1 else ""


def number_ranges(numbers: Sequence[int]) -> str:
    """Numbers in their order, runs of them shortened: (0, 1, 2, 3, 8) → "0–3, 8"."""
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
