"""The communicators of a job, merged from the NCCL logs of its processes. Loads no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megabench.hardware.gpus import Network, find_instance
from megabench.hardware.topology import Host, Topology, components
from megabench.hardware.transport import CommInit, Communicator, Connection, NcclLog, Process, in_order

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
    """The merged logs of a job. `logs` has one entry per file. The largest communicator is the first."""

    logs: list[NcclLog]
    communicators: list[JobCommunicator]

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts, in the order of the ranks of the largest communicator, then of the logs."""
        largest = self.communicators[0].hosts if self.communicators else {}
        names = [largest[rank] for rank in sorted(largest)] or [host for log in self.logs for host in log.hosts]
        return list(dict.fromkeys(names))

    def transports(self, where: Where) -> list[str]:
        """The distinct transports of all communicators inside hosts or between hosts, slowest first."""
        return in_order(name for made in self.communicators for name in made.pairs_by_transport(where))

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
    events = [event for log in logs for event in log.events]
    keys = _keys([event for event in events if isinstance(event, CommInit)])
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
    for connection, creation in _assign(events, keys, members, told):
        key = keys[creation] if creation else ("no communicator",)
        _add(made.setdefault(key, JobCommunicator(0)), connection)
    for communicator in made.values():
        _complete_hosts(communicator)
    order = sorted(made.values(), key=lambda one: (-one.num_ranks, -len(one.transports)))
    return NcclJob(list(logs), order)


def _keys(inits: Iterable[CommInit]) -> dict[CommInit, _Key]:
    """Return a key for each created communicator, equal for all of its ranks."""
    keys: dict[CommInit, _Key] = {}
    current: dict[tuple[Process, str], _Key] = {}
    counts: Counter[tuple[Process, int]] = Counter()
    taken: dict[_Key, set[int]] = {}
    for init in inits:
        if init.comm_id:
            key: _Key = ("id", init.comm_id)
        elif init.split:
            parent, number, color = init.split
            key = ("split", current.get((init.process, parent)), number, color)
        else:  # older versions log no id: the n-th communicator of this size in each process
            key = ("size", init.num_ranks, counts[init.process, init.num_ranks])
            counts[init.process, init.num_ranks] += 1
        keys[init] = current[init.process, init.handle] = key
    for init, key in keys.items():
        taken.setdefault(key, set()).add(init.rank)
    sizes = Counter(keys.values())
    # Without an id, several communicators of one size cannot be told apart by their ranks alone.
    return {
        init: (*key, init.process) if key[0] == "size" and sizes[key] > len(taken[key]) else key
        for init, key in keys.items()
    }


def _assign(
    events: Iterable[CommInit | Connection],
    keys: Mapping[CommInit, _Key],
    members: Mapping[_Key, Mapping[int, CommInit]],
    told: Mapping[tuple[Process | None, str | None], Communicator],
) -> list[tuple[Connection, CommInit | None]]:
    """Return the communicator of each connection. A line of NCCL's log does not name it.

    It is the last communicator that the process created, in which the process has the rank of the line, and in which
    the peer has the GPU of the line. Communicators in which the two ranks are probably on one host for P2P and SHM, and
    on two hosts for the network, take precedence.
    """
    by_process: dict[Process | None, list[CommInit | Connection]] = {}
    for event in events:
        by_process.setdefault(event.process, []).append(event)
    assigned = []
    for mine in by_process.values():
        inits = [event for event in mine if isinstance(event, CommInit)]
        num_created = 0
        for event in mine:
            if isinstance(event, CommInit):
                num_created += 1
                continue
            # Versions that log no start of the creation log the communicator after its connections.
            later = [init for init in inits[num_created:] if not init.is_start]
            candidates = [
                init for init in later[:1] + inits[:num_created][::-1] if _fits(event, init, members[keys[init]])
            ]
            candidates.sort(key=lambda init: not _is_likely(event, told.get((init.process, init.handle))))
            assigned.append((event, candidates[0] if candidates else None))
    return assigned


def _fits(connection: Connection, init: CommInit, ranks: Mapping[int, CommInit]) -> bool:
    own, peer = connection.sender, connection.receiver
    devices = connection.devices
    if connection.is_received:
        own, peer, devices = peer, own, devices[::-1]
    if connection.handle:
        return connection.handle == init.handle
    if init.rank != own or peer >= init.num_ranks or devices[0] not in init.devices:
        return False
    return peer not in ranks or devices[1] in ranks[peer].devices


def _is_likely(connection: Connection, communicator: Communicator | None) -> bool:
    """Return whether a transport fits the places of its ranks if the ranks are numbered host by host."""
    if communicator is None:
        return True
    hosts = {rank // communicator.local_ranks for rank in (connection.sender, connection.receiver)}
    return (len(hosts) == 1) == _is_inside(connection.transport)


def _add(communicator: JobCommunicator, connection: Connection) -> None:
    pair = connection.sender, connection.receiver
    communicator.num_ranks = max(communicator.num_ranks, *(rank + 1 for rank in pair))
    communicator.transports.setdefault(pair, set()).add(connection.transport)
    own = connection.receiver if connection.is_received else connection.sender
    if connection.process:
        communicator.hosts.setdefault(own, connection.process.host)


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
    return transport == "SHM" or (transport.startswith("P2P") and transport != "P2P/MNNVL")


def network_of(transports: Sequence[str], provider: str | None) -> Network:
    """Return the network (EFA, InfiniBand or sockets) of the slowest transport between hosts.

    The libfabric provider tells EFA from TCP. Other RDMA networks (RoCE, Slingshot, plugins) count as InfiniBand.
    """
    on_network = [name for name in transports if name.startswith(("NET", "COLLNET"))]
    if not on_network or on_network[0] == "NET/Socket" or (provider or "").split(";")[0] in ("tcp", "sockets", "udp"):
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
    host_of = tuple(names.index(largest.hosts[rank]) for rank in range(largest.num_ranks))
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
            if "P2P/MNNVL" in names or (p2p_is_nvlink and any(name.startswith("P2P") for name in names)):
                linked.append((a, b))
    if p2p_is_nvlink and all(name.startswith("P2P") for name in job.transports("inside")):
        first_rank: dict[int, int] = {}
        for rank, host in enumerate(host_of):
            if host not in connected:
                linked.append((first_rank.setdefault(host, rank), rank))
    return linked
