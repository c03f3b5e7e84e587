"""Seconds that groups of ranks take to communicate on a topology. Loads no torch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, log2

from megabench.cost.profile import LinkCost, Profile
from megabench.hardware.topology import Host, Link, Topology


@dataclass(frozen=True)
class Span:
    """The position of the worst process group of a kind, with `size` ranks on `hosts` hosts.

    `inside` is the slowest link within a host, or None if each rank has a host of its own. `across` is the link between
    hosts, or None if the group is on one host. `sharing` is the number of groups of this kind that use the NICs of
    `host`, and `nic_ranks` the number of ranks that share these NICs.
    """

    size: int
    hosts: int
    inside: Link | None
    across: Link | None
    sharing: int
    host: Host
    nic_ranks: int = 1

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def nic_load(self) -> float:
        """The number of groups per Gbit/s of the NICs. It is infinite if the bandwidth is unknown."""
        return _load(self.sharing, self.host)


def _load(sharing: int, host: Host) -> float:
    return sharing / host.network_gbits if host.network_gbits else inf


def span(topology: Topology, groups: Iterable[Sequence[int]]) -> Span:
    """Return a span with the worst properties of all groups.

    These are the largest number of hosts, the slowest links, and the NICs with the most groups per Gbit/s.

    The hosts of one NVLink domain count as one host with all their NICs. The hosts of one server share its NICs.
    """
    node_of, domain_of, nics_of = topology.node_of, topology.domain_of, topology.nics_of
    size, most_hosts = 1, 1
    # one pair of ranks for each pair of places is enough, because other pairs use the same link
    inside: dict[tuple[int, int], tuple[int, int]] = {}
    across: dict[tuple[int, int], tuple[int, int]] = {}
    sending: Counter[int] = Counter()  # groups that leave each node
    leaving: Counter[int] = Counter()  # the same by NICs, once for each node
    between_nics: Counter[int] = Counter()  # the groups on several NICs
    for ranks in groups:
        size = max(size, len(ranks))
        firsts: dict[int, int] = {}
        for rank in ranks:
            first = firsts.setdefault(node_of[rank], rank)
            if first != rank:
                inside[domain_of[first], domain_of[rank]] = (first, rank)
        if len(firsts) > 1:
            most_hosts = max(most_hosts, len(firsts))
            first = ranks[0]
            for node, other in firsts.items():
                if other != first:
                    across[node_of[first], node] = (first, other)
            used = [nics_of[rank] for rank in firsts.values()]
            sending.update(firsts.keys())
            leaving.update(used)
            if len(set(used)) > 1:
                between_nics.update(set(used))
    slowest = topology.slowest_link(across.values())
    # Sockets between hosts of one server use its kernel, and no NIC. A ring passes each server once.
    load = between_nics if slowest == "socket" else leaving
    if load:
        number = max(sorted(load), key=lambda number: _load(load[number], topology.nics[number].host))
        nics, sharing = topology.nics[number], load[number]
    else:
        nics, sharing = min(topology.nics, key=lambda nics: nics.host.speed), max(sending.values(), default=0)
    return Span(
        size=size,
        hosts=most_hosts,
        inside=topology.slowest_link(inside.values()),
        across=slowest,
        sharing=sharing,
        host=nics.host if load or not sharing else replace(nics.host, network_gbits=None),
        nic_ranks=nics.num_ranks,
    )


def inner_bandwidth(host: Host, link: Link, cost: LinkCost) -> float:
    """Return the bytes per second that a GPU sends to the next GPU on its host."""
    stated = host.nvlink_gb_per_s if link == "nvlink" else None
    return _bandwidth(stated, link, cost)


def host_bandwidth(host: Host, link: Link, cost: LinkCost) -> float:
    """Return the bytes per second that a host sends through all its NICs."""
    stated = host.network_gbits / 8 if host.network_gbits and link == host.network else None
    return _bandwidth(stated, link, cost)


def _bandwidth(stated: float | None, link: Link, cost: LinkCost) -> float:
    assert stated or cost.gb_per_s, f"the profile of {link} has no bandwidth"
    return (stated * cost.efficiency if stated else cost.gb_per_s or 0.0) * 1e9


def ring_bandwidth(profile: Profile, where: Span) -> float:
    """Return the bus bandwidth of a ring in bytes per second.

    A ring crosses each host once over all its NICs, which `sharing` rings share. Inside a host, the ring passes from
    GPU to GPU.
    """
    rates = []
    if where.inside:
        rates.append(_link_bandwidth(profile, where))
    if where.across:
        rates.append(_nic_bandwidth(profile, where, where.sharing))
    return min(rates)


def _link_bandwidth(profile: Profile, where: Span) -> float:
    """Return the bytes per second that a rank of a group sends inside its host.

    Two ranks reach less than larger groups.
    """
    assert where.inside
    cost = profile.links[where.inside]
    return inner_bandwidth(where.host, where.inside, cost) * (cost.pair_share if where.size == 2 else 1.0)


def _nic_bandwidth(profile: Profile, where: Span, flows: float) -> float:
    """Return the bytes per second that each of several flows gets from a host's NICs.

    A flow is a ring or a single rank.
    """
    assert where.across
    part = host_bandwidth(where.host, where.across, profile.links[where.across]) / flows
    return min(part, where.host.ring_gbits / 8 * 1e9) if where.host.ring_gbits else part


def _costs(profile: Profile, where: Span) -> tuple[float, float, float]:
    """Return the base seconds of a collective, and the seconds of a hop inside a host and between hosts."""
    inner = profile.links[where.inside] if where.inside else None
    outer = profile.links[where.across] if where.across else None
    base = max(cost.base_seconds for cost in (inner, outer) if cost)
    inside = inner.hop_seconds if inner else 0.0
    return base, inside, outer.hop_seconds if outer else inside


def gather_seconds(profile: Profile, where: Span, num_bytes: float, calls: int = 1) -> float:
    """Return the seconds of ring all-gathers or reduce-scatters of `num_bytes` in total, in equal calls.

    The time of a call is base + (n − 1)·hop + (n − 1)/n·bytes / bandwidth. All ranks advance together, so the slowest
    hop counts. Published all-gathers over 2 to 64 hosts agree within 20% with a hop of 40 µs. Published all-gathers do
    not agree with NCCL's tuner, which counts only hosts − 1 slow hops.
    """
    if where.is_alone or num_bytes == 0:
        return 0.0
    base, _, hop = _costs(profile, where)
    steps = where.size - 1
    return calls * (base + steps * hop) + steps / where.size * num_bytes / ring_bandwidth(profile, where)


def exchange_seconds(profile: Profile, where: Span, num_bytes: float, calls: int = 1) -> float:
    """Return the seconds of all-to-alls in equal calls. Each rank sends every other rank its part directly.

    With n ranks, g per host, a rank sends (g − 1)/n of its bytes inside the host and (n − g)/n to other hosts, over
    NICs that the g ranks share. No rank uses more NIC bandwidth than a single ring could use.
    """
    if where.is_alone or num_bytes == 0:
        return 0.0
    here, times = where.size / where.hosts, [0.0]
    if where.inside:
        times.append((here - 1) / where.size * num_bytes / _link_bandwidth(profile, where))
    if where.across:
        rate = _nic_bandwidth(profile, where, where.sharing * here)
        times.append((where.size - here) / where.size * num_bytes / rate)
    base, _, hop = _costs(profile, where)
    return calls * (base + hop) + max(times)


def all_reduce_seconds(profile: Profile, where: Span, num_bytes: float, calls: int = 1) -> float:
    """Return the seconds of an all-reduce by a ring or by trees, whichever is faster, as in NCCL.

    A tree consists of a chain on each host and log2(hosts) levels between hosts. Data go up the tree and down again, so
    the latency is 2·((n/hosts − 1)·inner hop + log2(hosts)·outer hop). Every GPU sends `num_bytes` along the chain of
    its host, and every host sends 2·(hosts − 1)/hosts·`num_bytes` to other hosts, at `tree_share` of a ring's
    bandwidth. Published times of 256 MB on healthy networks hardly grow from 4 to 64 hosts.
    """
    ring = 2 * gather_seconds(profile, where, num_bytes, calls)
    if where.across is None or num_bytes == 0:
        return ring
    base, inside, across = _costs(profile, where)
    ring -= calls * base
    latency = base + 2 * ((where.size / where.hosts - 1) * inside + log2(where.hosts) * across)
    rate = _nic_bandwidth(profile, where, where.sharing) * profile.links[where.across].tree_share
    times = [2 * (where.hosts - 1) / where.hosts * num_bytes / rate]
    if where.inside:
        times.append(num_bytes / inner_bandwidth(where.host, where.inside, profile.links[where.inside]))
    return min(ring, calls * latency + max(times))


def send_seconds(profile: Profile, where: Span, num_bytes: float, ranks_per_node: int) -> float:
    """Return the seconds to send from one pipeline stage to the next, for all ranks of the boundary at once.

    Between hosts, `sharing` ranks share the NICs. Over EFA and InfiniBand, each GPU can use only its own NICs. Over
    sockets, one rank may use all NICs.
    """
    if where.is_alone or num_bytes == 0:
        return 0.0
    times = []
    if where.inside:
        cost = profile.links[where.inside]
        times.append(cost.base_seconds + num_bytes / inner_bandwidth(where.host, where.inside, cost))
    if where.across:
        cost = profile.links[where.across]
        flows = where.sharing if where.across == "socket" else max(where.sharing, ranks_per_node)
        times.append(cost.base_seconds + cost.hop_seconds + num_bytes / _nic_bandwidth(profile, where, flows))
    return max(times)
