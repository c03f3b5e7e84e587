"""The communicators of a job, merged from the NCCL logs of its processes. Loads no torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal

from megabench.hardware.gpus import Network, find_instance
from megabench.hardware.topology import Host, Topology, components
from megabench.hardware.transport import (
    EMULATED,
    CommInit,
    Communicator,
    Connection,
    Event,
    NcclLog,
    Process,
    UnknownInit,
    in_order,
)

Where = Literal["inside", "between"]
_Key = tuple[object, ...]


@dataclass
class JobCommunicator:
    """One communicator. `transports` maps each connected pair (sender, receiver) of its ranks to NCCL's transports.

    `hosts` maps each rank whose host is known to the name of the host. `places` maps each rank that wrote to a log to
    its process and the bus id of its GPU. `num_nodes` is the number of hosts that NCCL detected.
    """

    num_ranks: int
    num_nodes: int | None = None
    local_ranks: int | None = None
    hosts: dict[int, str] = field(default_factory=dict)
    places: dict[int, tuple[Process, str]] = field(default_factory=dict)
    transports: dict[tuple[int, int], set[str]] = field(default_factory=dict)

    @property
    def gpus_per_host(self) -> int | None:
        """The largest number of ranks on a host, or None if the logs do not tell."""
        if self.local_ranks or len(self.hosts) < self.num_ranks:
            return self.local_ranks
        return max(Counter(self.hosts.values()).values())

    def where(self, pair: tuple[int, int]) -> Where:
        """Return whether a pair of ranks is inside one host or between two hosts.

        If a host is unknown, the transport tells: a network transport connects hosts, unless there is only one host.
        """
        hosts = {self.hosts.get(rank) for rank in pair}
        if None in hosts:
            is_on_network = any(name.startswith(("NET", "P2P/MNNVL")) for name in self.transports[pair])
            return "between" if is_on_network and self.num_nodes != 1 else "inside"
        return "between" if len(hosts) > 1 else "inside"

    def pairs_by_transport(self, where: Where) -> dict[str, list[tuple[int, int]]]:
        """Return the sorted pairs of each transport, inside hosts or between hosts. The slowest transport is first."""
        found: dict[str, list[tuple[int, int]]] = {}
        for pair, names in sorted(self.transports.items()):
            if self.where(pair) == where:
                for name in names:
                    found.setdefault(name, []).append(pair)
        return {name: found[name] for name in in_order(found)}


@dataclass
class NcclJob:
    """The merged logs of a job. `logs` has one entry per file. The largest communicator is the first.

    `strays` are connections of communicators whose creation the logs do not contain. `num_ambiguous` is the number of
    created communicators that the logs do not tell apart; each of their processes has its own entry in `communicators`.
    """

    logs: list[NcclLog]
    communicators: list[JobCommunicator]
    strays: list[Connection] = field(default_factory=list)
    num_ambiguous: int = 0

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts, in the order of the ranks of the largest communicator, then of the logs."""
        largest = self.communicators[0].hosts if self.communicators else {}
        names = dict.fromkeys(largest[rank] for rank in sorted(largest))
        named = {name.partition("#")[0] for name in names}  # hosts with equal names are host#0 and host#1
        return [*names, *dict.fromkeys(host for log in self.logs for host in log.hosts if host not in named)]

    def transports(self, where: Where) -> list[str]:
        """The distinct transports of all communicators inside hosts or between hosts, slowest first."""
        return self._transports[where]

    @cached_property
    def _transports(self) -> dict[Where, list[str]]:
        found: dict[Where, set[str]] = {"inside": set(), "between": set()}
        for made in self.communicators:
            for pair, names in made.transports.items():
                found[made.where(pair)] |= names
        return {where: in_order(names) for where, names in found.items()}

    def first(self, name: Literal["version", "network", "provider", "plugin", "platform"]) -> str | None:
        """Return a field of the first log that contains it."""
        return next((found for log in self.logs if (found := getattr(log, name))), None)

    @property
    def intra_host_link(self) -> Literal["nvlink", "pcie"] | None:
        """The link that P2P transports use inside hosts, or None if the logs do not tell."""
        paths = set().union(*(log.intra_host_paths for log in self.logs))
        instance = find_instance(self.first("platform") or "")
        if "NVL" in paths or (instance and instance.nvlink_domain > 1):
            return "nvlink"
        return "pcie" if paths & {"PIX", "PXB", "PHB", "NODE", "SYS"} or instance else None

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks of the largest communicator that wrote to none of the logs."""
        largest = self.communicators[0]
        return [rank for rank in range(largest.num_ranks) if rank not in largest.places]


def merge(logs: Sequence[NcclLog]) -> NcclJob:
    """Assign the connections of all logs to communicators, and the ranks of each communicator to hosts."""
    by_process: dict[Process | None, list[Event]] = {}
    for log in logs:
        for event in log.events:
            by_process.setdefault(event.process, []).append(event)
    keys, num_ambiguous = _keys(by_process.values())
    members: dict[_Key, dict[int, CommInit]] = {}
    for init, key in keys.items():
        members.setdefault(key, {})[init.rank] = init
    made = {
        key: JobCommunicator(
            num_ranks=next(iter(ranks.values())).num_ranks,
            hosts={rank: init.process.host for rank, init in ranks.items()},
            places={rank: (init.process, init.bus_id) for rank, init in ranks.items()},
        )
        for key, ranks in members.items()
    }
    told = {(one.process, one.handle): one for log in logs for one in log.communicators}
    for init, key in keys.items():
        if (init.process, init.handle) in told:
            described = told[init.process, init.handle]
            made[key].num_nodes, made[key].local_ranks = described.num_nodes, described.local_ranks
    strays = []
    for connection, creation in _assign(by_process.values(), keys, members, told):
        if creation:
            _add(made[keys[creation]], connection)
        elif made:
            strays.append(connection)
    if not made and (lone := [event for log in logs for event in log.connections]):
        # The logs contain no communicator at all, for example under NCCL_DEBUG_SUBSYS=NET. Most jobs have one.
        made["no communicator",] = JobCommunicator(0)
        for connection in lone:
            _add(made["no communicator",], connection)
    for communicator in made.values():
        _complete_hosts(communicator)
    order = sorted(made.values(), key=lambda one: (-one.num_ranks, -len(one.transports)))
    return NcclJob(list(logs), order, strays, num_ambiguous)


def _keys(processes: Iterable[Sequence[Event]]) -> tuple[dict[CommInit, _Key], int]:
    """Return a key for each created communicator, equal for all of its ranks, and the number of ambiguous ones.

    NCCL's ids are not unique: until 2.23, the splits of a communicator with equal colors have equal ids, and 2.16 and
    older versions log no id. If a rank occurs twice, the order of the creations in each process tells them apart.
    """
    parents: dict[CommInit, CommInit | None] = {}
    order: dict[CommInit, int] = {}  # number of the creation in its process, or among the splits of its parent
    for events in processes:
        current: dict[str, CommInit] = {}
        counts: Counter[CommInit | None] = Counter()
        for init in events:
            if isinstance(init, CommInit):
                parent = current.get(init.split[0]) if init.split else None
                parents[init] = parent
                order[init] = counts[parent]
                counts[parent] += 1
                current[init.handle] = init
    keys: dict[CommInit, _Key] = {}
    num_ambiguous = 0
    waiting = list(parents)
    while waiting:
        ready = [init for init in waiting if (parent := parents[init]) is None or parent in keys]
        alike: dict[_Key, list[CommInit]] = {}
        for init in ready:
            parent = parents[init]
            _, number, color = init.split or (None, None, None)
            same = ("split", parent and keys[parent], number, color) if init.split else ("id", init.comm_id)
            alike.setdefault((*same, init.num_ranks), []).append(init)
        for key, inits in alike.items():
            divided, is_ambiguous = _divide(key, inits, order)
            keys |= divided
            num_ambiguous += is_ambiguous
        waiting = [init for init in waiting if init not in keys]
    return keys, num_ambiguous


def _divide(key: _Key, inits: Sequence[CommInit], order: Mapping[CommInit, int]) -> tuple[dict[CommInit, _Key], bool]:
    """Divide creations with equal ids into communicators, in which each rank occurs once."""
    nth: dict[CommInit, int] = {}  # number of the creation among those with this id in its process
    counts: Counter[tuple[Process, int]] = Counter()
    for init in inits:
        nth[init] = counts[init.process, init.rank]
        counts[init.process, init.rank] += 1
    for numbers in (dict.fromkeys(inits, 0), order, nth):
        if len({(numbers[init], init.rank) for init in inits}) == len(inits):
            return {init: (*key, numbers[init]) for init in inits}, False
    return {init: (*key, init.process, nth[init]) for init in inits}, True


def _assign(
    processes: Iterable[Sequence[Event]],
    keys: Mapping[CommInit, _Key],
    members: Mapping[_Key, Mapping[int, CommInit]],
    told: Mapping[tuple[Process | None, str | None], Communicator],
) -> Iterator[tuple[Connection, CommInit | None]]:
    """Yield each connection and its communicator, or None if it is unknown. A line of NCCL's log does not name it.

    It is the last communicator that the process created, in which the process has the rank of the line, and in which
    the peer has the GPU of the line. Communicators in which the two ranks are probably on one host for P2P and SHM, and
    on two hosts for the network, take precedence. A communicator whose creation has an unknown format may be any.
    """
    for events in processes:
        # Versions that log no start of the creation log the communicator after its connections.
        next_end: dict[int, CommInit] = {}
        later: list[CommInit | None] = []
        for event in reversed(events):
            if isinstance(event, CommInit) and not event.is_start:
                next_end[event.rank] = event
            later.append(next_end.get(event.own_rank) if isinstance(event, Connection) else None)
        created: list[CommInit | UnknownInit] = []
        for event, end in zip(events, reversed(later), strict=True):
            if not isinstance(event, Connection):
                created.append(event)
                continue
            fitting = None
            for init in chain([end], reversed(created)):
                if isinstance(init, UnknownInit):
                    fitting = None
                    break
                if init and _fits(event, init, members[keys[init]]):
                    fitting = fitting or init
                    if _is_likely(event, told.get((init.process, init.handle))):
                        fitting = init
                        break
            yield event, fitting


def _fits(connection: Connection, init: CommInit, ranks: Mapping[int, CommInit]) -> bool:
    if connection.handle:
        return connection.handle == init.handle
    peer, devices = connection.receiver, connection.devices
    if connection.is_received:
        peer, devices = connection.sender, devices[::-1]
    if init.rank != connection.own_rank or peer >= init.num_ranks or devices[0] not in ("", *init.devices):
        return False
    return peer not in ranks or devices[1] in ("", *ranks[peer].devices)


def _is_likely(connection: Connection, communicator: Communicator | None) -> bool:
    """Return whether a transport fits the places of its ranks if the ranks are numbered host by host."""
    if communicator is None or connection.transport.startswith("P2P/MNNVL"):
        return True
    hosts = {rank // communicator.local_ranks for rank in (connection.sender, connection.receiver)}
    return (len(hosts) == 1) == _is_inside(connection.transport)


def _add(communicator: JobCommunicator, connection: Connection) -> None:
    pair = connection.sender, connection.receiver
    communicator.num_ranks = max(communicator.num_ranks, *(rank + 1 for rank in pair))
    communicator.transports.setdefault(pair, set()).add(connection.transport)
    if connection.process:
        communicator.hosts.setdefault(connection.own_rank, connection.process.host)


def _complete_hosts(communicator: JobCommunicator) -> None:
    """Find the hosts of ranks that wrote to no log, and tell hosts with equal names apart."""
    joined = components(
        communicator.num_ranks,
        (pair for pair, names in communicator.transports.items() if any(_is_inside(name) for name in names)),
    )
    for ranks in joined:
        names = {communicator.hosts[rank] for rank in ranks if rank in communicator.hosts}
        if len(names) == 1:
            communicator.hosts.update(dict.fromkeys(ranks, names.pop()))
    num_nodes, local_ranks = communicator.num_nodes, communicator.local_ranks
    missing = [rank for rank in range(communicator.num_ranks) if rank not in communicator.hosts]
    known = set(communicator.hosts.values())
    if missing and num_nodes and local_ranks and len(missing) == (num_nodes - len(known)) * local_ranks:
        # Launchers number the ranks host by host.
        for index, rank in enumerate(missing):
            communicator.hosts[rank] = f"host-{len(known) + index // local_ranks + 1} (not in the logs)"
    elif not missing and num_nodes and len(known) < num_nodes == len(joined):
        # NCCL_HOSTID or containers with equal names: NCCL counts more hosts than there are names.
        for number, ranks in enumerate(joined):
            communicator.hosts.update({rank: f"{communicator.hosts[rank]}#{number}" for rank in ranks})


def _is_inside(transport: str) -> bool:
    return transport == "SHM" or (transport.startswith("P2P") and not transport.startswith("P2P/MNNVL"))


def network_of(transports: Sequence[str], provider: str | None) -> Network:
    """Return the network (EFA, InfiniBand or sockets) of the slowest transport between hosts.

    The libfabric provider tells EFA from TCP. The CPUs copy the data of the plugin for emulated hosts, as for sockets.
    Other RDMA networks (RoCE, Slingshot, plugins) count as InfiniBand.
    """
    on_network = [name for name in transports if name.startswith(("NET", "COLLNET"))]
    if (
        not on_network
        or on_network[0] in ("NET/Socket", EMULATED)
        or (provider or "").split(";")[0] in ("tcp", "sockets", "udp")
    ):
        return "socket"
    is_efa = "Libfabric" in on_network[0] and provider in (None, "efa", "efa-direct")
    return "efa" if is_efa else "infiniband"


def topology_of(job: NcclJob, p2p_is_nvlink: bool) -> Topology | None:
    """Return the topology of the largest communicator, or None if the host of a rank is unknown.

    The P2P transports connect NVLink domains if `p2p_is_nvlink`, else they use PCIe.
    """
    if not job.communicators or len(job.communicators[0].hosts) < job.communicators[0].num_ranks:
        return None
    largest = job.communicators[0]
    names = list(dict.fromkeys(largest.hosts[rank] for rank in range(largest.num_ranks)))
    number_of = {name: number for number, name in enumerate(names)}
    host_of = tuple(number_of[largest.hosts[rank]] for rank in range(largest.num_ranks))
    domains = components(largest.num_ranks, _nvlinks(job, host_of, p2p_is_nvlink))
    instance = find_instance(job.first("platform") or "")
    host = Host(
        name="",
        device=instance.gpu if instance else "GPU",
        inside="shm" if "SHM" in job.transports("inside") else "pcie",
        network=network_of(job.transports("between"), job.first("provider")),
        network_gbits=instance.network_gbits if instance else None,
        nvlink_gb_per_s=instance.nvlink_gb_per_s or None if instance else None,
    )
    order = sorted(range(largest.num_ranks), key=lambda rank: (host_of[rank], rank))
    domain_of = {rank: number for number, domain in enumerate(domains) for rank in domain}
    seat_of = {rank: seat for seat, rank in enumerate(order)}
    return Topology(
        hosts=tuple(replace(host, name=name) for name in names),
        host_of=host_of,
        domain_of=tuple(domain_of[rank] for rank in range(largest.num_ranks)),
        seat_of=tuple(seat_of[rank] for rank in range(largest.num_ranks)),
    )


def _nvlinks(job: NcclJob, host_of: Sequence[int], p2p_is_nvlink: bool) -> list[tuple[int, int]]:
    """Return pairs of ranks of the largest communicator that share an NVLink domain.

    A host whose connections are in no log is taken for one NVLink domain, if no other host uses a slower transport.
    """
    largest = job.communicators[0]
    rank_at = {place: rank for rank, place in largest.places.items()}
    linked: list[tuple[int, int]] = []
    connected: set[int] = set()  # hosts with a connection inside the host
    for made in job.communicators:
        rank_of = {rank: rank_at[place] for rank, place in made.places.items() if place in rank_at}
        if made is largest:
            rank_of = {rank: rank for rank in range(largest.num_ranks)}
        for pair, names in made.transports.items():
            if not all(rank in rank_of for rank in pair):
                continue
            a, b = (rank_of[rank] for rank in pair)
            if made.where(pair) == "inside":
                connected.add(host_of[a])
            if any(name.startswith("P2P" if p2p_is_nvlink else "P2P/MNNVL") for name in names):
                linked.append((a, b))
    if p2p_is_nvlink and all(name.startswith("P2P") for name in job.transports("inside")):
        first_rank: dict[int, int] = {}
        for rank, host in enumerate(host_of):
            if host not in connected:
                linked.append((first_rank.setdefault(host, rank), rank))
    return linked
