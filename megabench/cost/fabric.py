"""Measured collectives between hosts: the link costs that follow from them, and their share of a healthy network.

Loads no torch.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megabench.cost import network
from megabench.cost.fitting import descend
from megabench.cost.network import Span
from megabench.cost.profile import Profile
from megabench.hardware.topology import Host, Link, Topology
from megabench.settings.reading import ConfigError

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
_LARGE = 1e6  # bytes; smaller collectives do not represent training
_MOST_SHARE = 2.5  # measured bandwidth ÷ expected bandwidth; above it, the file is of another network


@dataclass(frozen=True)
class Collective:
    """A collective or send between hosts, and its seconds.

    `num_bytes` is the size of the larger buffer of a rank, as in nccl-tests: the output of an all-gather, the input of
    a reduce-scatter. Each group has `ranks_per_host` ranks on each of `num_hosts` hosts, and `groups_per_host` such
    groups communicate at once. A send goes from each rank of a host to its counterpart on the next host.
    """

    kind: Kind
    num_hosts: int
    ranks_per_host: int
    num_bytes: float
    seconds: float
    groups_per_host: int = 1

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def label(self) -> str:
        """The kind and the hosts, as text."""
        if self.kind == "send":
            return f"send from {self.ranks_per_host} ranks to the next host"
        groups = f" in {self.groups_per_host} groups at once" if self.groups_per_host > 1 else ""
        return f"{kind_name(self.kind)} over {self.num_hosts} hosts{groups}"

    @property
    def bus_gb_per_s(self) -> float:
        """Bus bandwidth in GB/s, as nccl-tests defines it (doc/PERFORMANCE.md)."""
        share = 1.0 if self.kind == "send" else (self.num_ranks - 1) / self.num_ranks
        return (2 if self.kind == "all_reduce" else 1) * share * self.num_bytes / self.seconds / 1e9

    def where(self, host: Host, inside: Link | None) -> Span:
        """Return the position of its groups on hosts like `host`, whose GPUs are connected by `inside`."""
        if self.kind == "send":
            return Span(2, 2, None, host.network, self.ranks_per_host, host)
        return Span(
            size=self.num_ranks,
            hosts=self.num_hosts,
            inside=inside if self.ranks_per_host > 1 else None,
            across=host.network if self.num_hosts > 1 else None,
            sharing=self.groups_per_host,
            host=host,
        )

    def predicted(self, profile: Profile, host: Host, inside: Link | None) -> float:
        """Return the seconds that the profile predicts."""
        where = self.where(host, inside)
        match self.kind:
            case "all_reduce":
                return network.all_reduce_seconds(profile, where, self.num_bytes)
            case "all_gather" | "reduce_scatter":
                return network.gather_seconds(profile, where, self.num_bytes)
            case "all_to_all":
                return network.exchange_seconds(profile, where, self.num_bytes)
            case "send":
                return network.send_seconds(profile, where, self.num_bytes, self.ranks_per_host)


def kind_name(kind: Kind) -> str:
    """Return the name of a kind in texts and in profiles, such as "all-gather"."""
    return kind.replace("_", "-")


@dataclass(frozen=True)
class Bandwidth:
    """The bus bandwidth of a measured collective, and the one that a profile expects of it, in GB/s."""

    collective: Collective
    measured: float
    expected: float

    @property
    def share(self) -> float:
        return self.measured / self.expected


@dataclass(frozen=True)
class Fabric:
    """The measured collectives between hosts of one network. `source` is the path of their file."""

    source: str
    collectives: tuple[Collective, ...]

    def check(self, topology: Topology) -> None:
        """Raise ConfigError if the collectives do not describe the network of the topology."""
        if len(topology.hosts) == 1:
            raise ConfigError(
                f"--fabric {self.source} describes the network between hosts, but the cluster has one host. "
                f"Remove --fabric, or use a cluster of several hosts."
            )
        if max(topology.node_of) + 1 < len(topology.hosts):
            raise ConfigError(
                f"--fabric {self.source} does not work with hosts that share an NVLink domain "
                f"({topology.hosts[0].name}). Remove --fabric."
            )
        first = topology.hosts[0]
        if (
            any(replace(host, name=first.name) != first for host in topology.hosts)
            or len({len(ranks) for ranks in topology.ranks_by_host}) > 1
        ):
            raise ConfigError(
                f"--fabric {self.source} works only with equal hosts, but the cluster has different ones. Use a "
                f"cluster file with equal hosts."
            )
        # a GPU uses only its own NICs, so fewer GPUs would make the network look slow
        num_ranks = len(topology.ranks_by_host[0])
        for one in self.collectives:
            if (measured := one.ranks_per_host * one.groups_per_host) != num_ranks:
                raise ConfigError(
                    f"--fabric {self.source} was measured with {measured} ranks per host, but the hosts of the cluster "
                    f"have {num_ranks}. Measure with {num_ranks} ranks per host."
                )

    def check_fit(self, topology: Topology) -> None:
        """Raise ConfigError as `check` does, or if the sizes do not determine bandwidth and latency."""
        self.check(topology)
        if len({one.num_bytes for one in self.collectives if one.num_bytes >= _LARGE}) < 2:
            raise ConfigError(
                f"--fabric {self.source} needs collectives of at least two sizes from 1 MB on, to tell bandwidth from "
                f"latency. Measure several sizes, such as -b 1M -e 256M -f 4."
            )

    def profile_on(self, profile: Profile, topology: Topology) -> Profile:
        """Return the profile with the cost of the topology's network as measured."""
        host, inside = _measured_host(topology), inner_link(topology)
        rings = [one for one in self.collectives if one.kind != "all_reduce"]
        # All-reduces may use rings or trees, so they determine only the trees if there are other collectives.
        steps = [(rings or self.collectives, _measured_constants(host, rings or self.collectives))]
        if len(rings) < len(self.collectives):
            steps.append((self.collectives, [f"{host.network}.tree_share"]))
        for collectives, names in steps:
            profile = fit_links(profile, [(one, host, inside) for one in collectives], names)
            said = dict.fromkeys(names, f"measured between hosts ({self.source})")
            profile = profile.model_copy(update={"origin": profile.origin | said})
        return profile

    def bandwidths(self, profile: Profile, topology: Topology) -> list[Bandwidth]:
        """Return the bandwidth of the largest collective of each kind, next to the one that the profile expects."""
        host, inside = _measured_host(topology), inner_link(topology)
        largest = {one.kind: one for one in sorted(self.collectives, key=lambda one: (one.num_bytes, one.num_ranks))}
        found = []
        for one in (largest[kind] for kind in KINDS if kind in largest):
            expected = replace(one, seconds=one.predicted(profile, host, inside))
            found.append(Bandwidth(one, one.bus_gb_per_s, expected.bus_gb_per_s))
            if found[-1].share > _MOST_SHARE:
                raise ConfigError(
                    f"--fabric {self.source} is of another network: {one.label} reaches {one.bus_gb_per_s:,.1f} "
                    f"GB/s, and the cluster should reach {expected.bus_gb_per_s:,.1f} GB/s. Use the --cluster that was "
                    f"measured."
                )
        return found


def inner_link(topology: Topology) -> Link | None:
    """Return the slowest link between two ranks of the first host, or None if it has one rank."""
    ranks = topology.ranks_by_host[0]
    return topology.slowest_link((ranks[0], other) for other in ranks[1:])


def _measured_host(topology: Topology) -> Host:
    """Return a host of the topology with the bandwidth that a ring over all ranks has of its NICs.

    A ring passes each host of a server, so each of them has a part of the bandwidth of the server's NICs.
    """
    where = network.span(topology, [range(topology.world_size)])
    gbits = where.host.network_gbits
    return replace(where.host, network_gbits=gbits / where.sharing if gbits and where.sharing else None)


def _measured_constants(host: Host, collectives: Sequence[Collective]) -> list[str]:
    """Return the constants of the network that the collectives determine.

    The time per hop and the bandwidth need several sizes, and the base time needs groups of several lengths. With one
    size, which `check_fit` refuses, only the time per hop is fitted, because degraded networks differ from healthy
    ones in this constant (benchmarks/NOTES.md). The bandwidth comes first, because the search would otherwise explain
    it with longer hops.
    """
    link, sizes = host.network, {one.num_bytes for one in collectives if one.num_bytes >= _LARGE}
    names = [f"{link}.hop_seconds"]
    if len(sizes) > 1:
        names.insert(0, f"{link}.efficiency" if host.network_gbits else f"{link}.gb_per_s")
        if len({one.num_ranks for one in collectives}) > 1:
            names.append(f"{link}.base_seconds")
    return names


def fit_links(
    profile: Profile, measured: Sequence[tuple[Collective, Host, Link | None]], names: Sequence[str]
) -> Profile:
    """Return the profile whose constants best fit the collectives of at least 1 MB, or all if there are none.

    The second and third parts of `measured` are a collective's host and the link between its GPUs. The loss is the mean
    of |ln(predicted ÷ measured)|.
    """
    large = [entry for entry in measured if entry[0].num_bytes >= _LARGE] or measured

    def loss(candidate: Profile) -> float:
        return statistics.mean(
            abs(math.log(one.predicted(candidate, host, inside) / one.seconds)) for one, host, inside in large
        )

    return descend(profile, names, loss)
