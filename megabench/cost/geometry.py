"""The positions of a layout's groups on a topology. Loads no torch."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import lcm

from megabench.cost.network import Span, span
from megabench.hardware.topology import Topology
from megabench.parallel.layout import Layout
from megabench.parallel.placement import Policy, order_of


@dataclass(frozen=True)
class _Hosts:
    """Equal hosts that the ranks of a topology fill one after another: ranks per host and per NVLink domain."""

    host: int
    domain: int

    def keep_order(self, tp: int, cp: int) -> bool:
        """Return whether placing TP and CP groups by the topology keeps the order of the ranks."""
        in_domain, in_host = self.domain // tp, self.host // tp
        if self.domain % tp:
            return False
        return in_domain % cp == 0 or (cp % in_domain == 0 and (in_host % cp == 0 or cp % in_host == 0))


@lru_cache(maxsize=16)
def _equal_hosts(topology: Topology) -> _Hosts | None:
    """Return the hosts of a topology if they are equal and share no server, and the ranks fill one after another."""
    each, rest = divmod(topology.world_size, len(topology.hosts))
    first, domain = topology.hosts[0], topology.domain_of.count(topology.domain_of[0])
    if first.server or rest or each % domain:
        return None
    if any(replace(host, name=first.name) != first for host in topology.hosts[1:]):
        return None
    ranks = range(topology.world_size)
    is_filled = topology.host_of == tuple(rank // each for rank in ranks) and topology.seat_of == tuple(ranks)
    return _Hosts(each, domain) if is_filled and topology.domain_of == tuple(rank // domain for rank in ranks) else None


@lru_cache(maxsize=64)
def _placed(topology: Topology, tp: int, cp: int, policy: Policy) -> Topology:
    """Return the topology by the ranks of a run. The order of the ranks does not depend on pp and dp."""
    return topology.renumbered(order_of(topology, Layout(tp=tp, cp=cp), policy))


@dataclass(frozen=True)
class Geometry:
    """The spans of a layout's groups, computed on first use. `topology` is indexed by the ranks of the run.

    On a large cluster, groups repeat, and only the first of them are looked at. If the ranks fill equal hosts one after
    another, `period` is the number of ranks per host. If TP groups are spread over equal hosts, `part` is a geometry of
    fewer hosts with the same TP and CP groups.
    """

    topology: Topology
    layout: Layout
    period: int | None = None
    part: "Geometry | None" = None

    @classmethod
    def of(cls, topology: Topology, layout: Layout, policy: Policy) -> "Geometry":
        hosts = _equal_hosts(topology)
        if hosts and (policy == "launcher" or (policy == "topology" and hosts.keep_order(layout.tp, layout.cp))):
            return cls(topology, layout, period=hosts.host)
        part = _part_of_spread(topology, hosts, layout) if hosts and policy == "spread-tp" else None
        placed = _placed(topology, *((1, 1) if policy == "spread-tp" else (layout.tp, layout.cp)), policy)
        return cls(placed, layout, part=part)

    def _first(self, size: int) -> int:
        """Return the number of first ranks whose groups represent all groups inside blocks of `size` ranks."""
        if self.period is None:
            return self.layout.world_size
        return lcm(size, self.period)

    def _rank(self, pp: int, dp: int, cp: int, tp: int) -> int:
        layout = self.layout
        return ((pp * layout.data_parallel + dp) * layout.cp + cp) * layout.tp + tp

    @cached_property
    def tp(self) -> Span:
        if self.part:
            return self.part.tp
        size = self.layout.tp
        return span(self.topology, (range(at, at + size) for at in range(0, self._first(size), size)))

    @cached_property
    def cp(self) -> Span:
        if self.part:
            return self.part.cp
        step, block = self.layout.tp, self.layout.tp * self.layout.cp
        starts = (at + tp for at in range(0, self._first(block), block) for tp in range(step))
        return span(self.topology, (range(start, start + block, step) for start in starts))

    @cached_property
    def replicas(self) -> Span:
        """The groups of ranks with the same weights (dp and cp), over which gradients are summed."""
        return span(self.topology, self._replica_groups())

    def parted_replicas(self, size: int) -> tuple[Span, Span]:
        """Divide each group of replicas into parts of `size` neighbouring ranks.

        Return the span of these parts, and the span of groups with one rank from each part.
        """
        groups = self._replica_groups()
        inside = [group[at : at + size] for group in groups for at in range(0, len(group), size)]
        across = [group[at::size] for group in groups for at in range(size)]
        return span(self.topology, inside), span(self.topology, across)

    def _replica_groups(self) -> list[range]:
        layout = self.layout
        block = layout.world_size // layout.pp
        starts = (at + tp for at in range(0, self._first(block), block) for tp in range(layout.tp))
        return [range(start, start + block, layout.tp) for start in starts]

    @cached_property
    def pp(self) -> Span:
        """The worst boundary between pipeline stages, including the last and the first with interleaved chunks."""
        layout = self.layout
        block = layout.world_size // layout.pp
        boundaries = layout.pp if layout.vp > 1 else layout.pp - 1
        # every boundary is like one of the first hosts'
        boundaries = min(boundaries, 1 if self.part else self._first(block) // block)
        spans = []
        for stage in range(boundaries):
            start, after = stage * block, (stage + 1) % layout.pp * block
            spans.append(span(self.topology, ((start + rank, after + rank) for rank in range(block))))
        if not spans:
            return span(self.topology, ((0,),))
        return max(spans, key=lambda found: (found.across is not None, found.nic_load, found.sharing))

    @cached_property
    def ends(self) -> Span:
        """Pairs of ranks of the first and the last stage, which both have the tied embeddings."""
        block = self.layout.world_size // self.layout.pp
        last = self.layout.world_size - block
        return span(self.topology, ((rank, last + rank) for rank in range(block)))

    @cached_property
    def ranks_per_server(self) -> int:
        return self.topology.ranks_per_server

    @cached_property
    def world(self) -> Span:
        return span(self.topology, (range(self.layout.world_size),))

    def neighbours(self, size: int) -> Span:
        """Return groups of `size` neighbouring ranks."""
        return span(self.topology, (range(at, at + size) for at in range(0, self.layout.world_size, size)))

    def apart(self, size: int) -> Span:
        """Return groups with one rank from each group of `size` neighbours."""
        world = self.layout.world_size
        return span(self.topology, (range(start, world, size) for start in range(size)))


def _part_of_spread(topology: Topology, hosts: _Hosts, layout: Layout) -> Geometry | None:
    """Return a geometry with as few of the equal hosts as have the same TP and CP groups, spread over domains.

    Consecutive ranks are in consecutive domains, so groups repeat after lcm(tp·cp, domains per host) domains. Return
    None if these do not divide the domains of the cluster, or if the boundaries of pipeline stages differ.
    """
    num_domains, per_host = topology.world_size // hosts.domain, hosts.host // hosts.domain
    repeat, stage = lcm(layout.tp * layout.cp, per_host), layout.world_size // layout.pp
    has_equal_boundaries = stage % per_host == 0 and (stage % num_domains == 0 or num_domains % stage == 0)
    if repeat == num_domains or num_domains % repeat or not has_equal_boundaries:
        return None
    size = repeat * hosts.domain
    some = Topology(
        hosts=topology.hosts[: repeat // per_host],
        host_of=topology.host_of[:size],
        domain_of=topology.domain_of[:size],
        seat_of=topology.seat_of[:size],
    )
    return Geometry.of(some, Layout(tp=layout.tp, cp=layout.cp).with_world_size(size), "spread-tp")
