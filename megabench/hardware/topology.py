"""Topology: the host and the NVLink domain of each rank, and the link between any two ranks. Loads no torch.

The rules for hosts follow src/init.cc of NCCL 2.28. The rules for NVLinks follow src/graph/paths.cc and
src/graph/xml.cc of NCCL 2.28.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import combinations, pairwise
from math import ceil, inf
from typing import TYPE_CHECKING, Literal

from megabench import shipped
from megabench.errors import UserError, near_names
from megabench.hardware.facts import RankFacts
from megabench.hardware.gpus import (
    INSTANCE_NAMES,
    ULTRASERVER_NAMES,
    Instance,
    Network,
    find_instance,
    find_ultraserver,
    near_instances,
)

if TYPE_CHECKING:
    from torch.distributed import Store

Link = Literal["nvlink", "pcie", "shm", "infiniband", "efa", "socket"]
LINKS: tuple[Link, ...] = ("nvlink", "pcie", "shm", "infiniband", "efa", "socket")  # fastest first


class TopologyError(UserError):
    """Raised for an invalid cluster description, or if the topology cannot be discovered."""


@dataclass(frozen=True)
class Host:
    """One host. `device` is the name of its GPUs, or "cpu".

    `inside` is the link between GPUs of the host that are in different NVLink domains. `nvlink_gb_per_s` is the NVLink
    bandwidth of one GPU in one direction. `network_gbits` is the total bandwidth of all NICs. `ring_gbits` is the part
    of `network_gbits` that one ring of ranks can use. Unknown bandwidths are None. `instance_type` is the name of the
    host's type in the catalogue, or None. `sees_one_gpu` means that a process of the host sees only its own GPU, and
    `has_one_queue` that the environment of a process sets CUDA_DEVICE_MAX_CONNECTIONS=1.

    Hosts with the same `server`, such as pods of one Kubernetes node, share the CPUs, the memory and the NICs of a
    server, and `network_gbits` is the bandwidth of the server's NICs. `server` is None for a host that shares nothing.
    """

    name: str
    device: str
    inside: Link
    network: Network
    network_gbits: float | None = None
    nvlink_gb_per_s: float | None = None
    ring_gbits: float | None = None
    instance_type: str | None = None
    sees_one_gpu: bool = False
    has_one_queue: bool = False
    server: str | None = None

    @property
    def speed(self) -> tuple[float, float, float]:
        """A sort key that orders slow hosts first. A host whose NICs have an unknown bandwidth counts as slow."""
        return self.network_gbits or 0.0, self.ring_gbits or inf, self.nvlink_gb_per_s or 0.0


@dataclass(frozen=True)
class Nics:
    """The NICs that `num_ranks` ranks share: those of a host, of a server, or of all hosts of an NVLink domain.

    `host` is the slowest of the hosts, with the bandwidth of all these NICs as `network_gbits`.
    """

    host: Host
    num_ranks: int


@dataclass(frozen=True)
class Topology:
    """The host and the NVLink domain of each rank. On CPU, the ranks of a host are one domain over shared memory.

    A host may have several domains (GPUs with NVLink bridges), and a domain may span several hosts (NVL72 racks).

    `host_of`, `domain_of` and `seat_of` give the index of each rank's host, NVLink domain and seat. Seats count GPUs,
    host by host. The indices of hosts, domains and seats are independent of the launcher's ranks.
    """

    hosts: tuple[Host, ...]
    host_of: tuple[int, ...]
    domain_of: tuple[int, ...]
    seat_of: tuple[int, ...]
    emulated: bool = False

    @property
    def world_size(self) -> int:
        return len(self.host_of)

    def with_emulated_network(self, gb_per_s: float | None) -> "Topology":
        """Return the topology with this bandwidth of each emulated host; None means that it is not limited."""
        if not self.emulated:
            return self
        gbits = gb_per_s * 8 if gb_per_s else None
        return replace(self, hosts=tuple(replace(host, network_gbits=gbits) for host in self.hosts))

    @cached_property
    def ranks_by_host(self) -> list[list[int]]:
        """The ranks of each host, sorted by seat."""
        members: list[list[int]] = [[] for _ in self.hosts]
        for rank in sorted(range(self.world_size), key=self.seat_of.__getitem__):
            members[self.host_of[rank]].append(rank)
        return members

    @cached_property
    def ranks_by_domain(self) -> list[list[int]]:
        """The ranks of each NVLink domain, in ascending order."""
        members: dict[int, list[int]] = {}
        for rank, domain in enumerate(self.domain_of):
            members.setdefault(domain, []).append(rank)
        return [members[domain] for domain in sorted(members)]

    @cached_property
    def hosts_by_server(self) -> dict[str, list[int]]:
        """The numbers of the hosts on each server. A host that shares no server is a server of its own."""
        members: dict[str, list[int]] = {}
        for number, host in enumerate(self.hosts):
            members.setdefault(host.server or f"host {number}", []).append(number)
        return members

    @property
    def shares_servers(self) -> bool:
        """Whether several hosts are on one server."""
        return len(self.hosts_by_server) < len(self.hosts)

    @property
    def hosts_in_words(self) -> str:
        """The number of hosts, and of servers if hosts share them, such as "4 hosts on 1 server"."""
        hosts, servers = len(self.hosts), len(self.hosts_by_server)
        text = f"{hosts:,} host{'s' * (hosts > 1)}"
        return f"{text} on {servers:,} server{'s' * (servers > 1)}" if self.shares_servers else text

    @cached_property
    def ranks_per_server(self) -> int:
        """The largest number of ranks that share the memory of a server. Emulated hosts are on one server."""
        if self.emulated:
            return self.world_size
        ranks = self.ranks_by_host
        return max(sum(len(ranks[host]) for host in hosts) for hosts in self.hosts_by_server.values())

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The number of each rank's node, as NCCL counts nodes. Hosts that share an NVLink domain are one node.

        Without shared domains, every host is a node. On two hosts of an NVL72 rack, NCCL logs "nNodes 1 … MNNVL 1".
        """
        spans = {(self.domain_of[rank], self.host_of[rank]) for rank in range(self.world_size)}
        hosts_of_domain: dict[int, list[int]] = {}
        for domain, host in sorted(spans):
            hosts_of_domain.setdefault(domain, []).append(host)
        pairs = [(hosts[0], other) for hosts in hosts_of_domain.values() for other in hosts[1:]]
        nodes = components(len(self.hosts), pairs)
        node_of_host = {host: number for number, hosts in enumerate(nodes) for host in hosts}
        return tuple(node_of_host[host] for host in self.host_of)

    @cached_property
    def nics(self) -> tuple[Nics, ...]:
        """The NICs of the cluster. Their order is that of their first hosts."""
        return tuple(self._nics_of(hosts) for hosts in self._hosts_by_nics)

    @cached_property
    def nics_of(self) -> tuple[int, ...]:
        """The number of the NICs that each rank uses."""
        nics_of_host = {host: number for number, hosts in enumerate(self._hosts_by_nics) for host in hosts}
        return tuple(nics_of_host[host] for host in self.host_of)

    @cached_property
    def _hosts_by_nics(self) -> tuple[tuple[int, ...], ...]:
        """The hosts that share NICs: those of a server, and those of a node, because NCCL uses all NICs of a node."""
        first_of_node: dict[int, int] = {}
        nodes = {
            (first_of_node.setdefault(node, host), host) for node, host in zip(self.node_of, self.host_of, strict=True)
        }
        servers = {(hosts[0], other) for hosts in self.hosts_by_server.values() for other in hosts}
        return components(len(self.hosts), nodes | servers)

    def _nics_of(self, hosts: Sequence[int]) -> Nics:
        """Return the NICs of these hosts. Hosts of one server state the bandwidth of the same NICs."""
        of_server = {self.hosts[host].server or f"host {host}": self.hosts[host].network_gbits for host in hosts}
        known = [gbits for gbits in of_server.values() if gbits]
        slowest = min((self.hosts[host] for host in hosts), key=lambda host: host.speed)
        return Nics(
            host=replace(slowest, network_gbits=sum(known) if len(known) == len(of_server) else None),
            num_ranks=sum(len(self.ranks_by_host[host]) for host in hosts),
        )

    def link(self, a: int, b: int) -> Link:
        """Return the link between two different ranks."""
        host, other = self.hosts[self.host_of[a]], self.hosts[self.host_of[b]]
        if self.domain_of[a] == self.domain_of[b]:
            return "shm" if host.device == "cpu" else "nvlink"
        if self.host_of[a] == self.host_of[b]:
            return host.inside
        # An EFA host and an InfiniBand host can communicate only over sockets.
        return host.network if host.network == other.network else "socket"

    def slowest_link(self, pairs: Iterable[tuple[int, int]]) -> Link | None:
        """Return the slowest link between any of the given pairs of ranks, or None without pairs."""
        return max((self.link(a, b) for a, b in pairs), key=LINKS.index, default=None)

    def count_links(self) -> dict[Link, int]:
        """Return the number of pairs of ranks for each kind of link."""
        counts: Counter[Link] = Counter()
        alike: dict[tuple[int, int], list[int]] = {}  # ranks of one host and one domain have equal links
        for rank, place in enumerate(zip(self.host_of, self.domain_of, strict=True)):
            alike.setdefault(place, []).append(rank)
        for ranks in alike.values():
            if len(ranks) > 1:
                counts[self.link(*ranks[:2])] += len(ranks) * (len(ranks) - 1) // 2
        for some, others in combinations(alike.values(), 2):
            counts[self.link(some[0], others[0])] += len(some) * len(others)
        return {kind: counts[kind] for kind in LINKS if kind in counts}

    def renumbered(self, ranks: Sequence[int]) -> "Topology":
        """Return the topology with renumbered ranks: the new rank n is the old rank `ranks[n]`."""
        return replace(
            self,
            host_of=tuple(self.host_of[rank] for rank in ranks),
            domain_of=tuple(self.domain_of[rank] for rank in ranks),
            seat_of=tuple(self.seat_of[rank] for rank in ranks),
        )


def discover(store: "Store", facts: RankFacts, rank: int, world_size: int) -> Topology:
    """Exchange facts about the hosts and devices of all ranks through `store`, and return the topology of the launch.

    Every rank must call `discover`. All ranks receive equal topologies. `discover` needs no process group.
    """
    store.set(f"facts/{rank}", facts.model_dump_json())
    keys = [f"facts/{number}" for number in range(world_size)]
    try:
        store.wait(keys, timedelta(minutes=5))
    except Exception:
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        raise TopologyError(
            f"ranks {missing} of {world_size} did not report their hosts within 5 minutes. "
            f"Check the logs of ranks {missing}."
        ) from None
    return from_facts([RankFacts.model_validate_json(text) for text in store.multi_get(keys)])


def from_facts(facts: Sequence[RankFacts]) -> Topology:
    """Return the topology that follows from the facts of all ranks. `facts` is indexed by rank.

    Raises TopologyError if two ranks use the same GPU.
    """
    rank_of: dict[str, int] = {}
    for rank, fact in enumerate(facts):
        if fact.gpu and (other := rank_of.setdefault(fact.gpu.uuid, rank)) != rank:
            raise TopologyError(
                f"ranks {other} and {rank} use the same GPU of {fact.hostname} ({fact.gpu.bus_id}). Start at most one "
                f"process per GPU, and set LOCAL_RANK to the number of the process on its host."
            )
    # equal for ranks that NCCL counts as one node and connects inside that node
    identities = [f"{fact.nccl_hostid or fact.hostname + fact.boot_id} {fact.shm_device}" for fact in facts]
    names = _host_names(facts, identities)
    order = sorted(set(identities), key=lambda identity: (_natural(names[identity]), identity))
    number_of = {identity: number for number, identity in enumerate(order)}
    host_of = tuple(number_of[identity] for identity in identities)
    bus_ids = [fact.gpu.bus_id if fact.gpu else "" for fact in facts]
    by_seat = sorted(range(len(facts)), key=lambda rank: (host_of[rank], bus_ids[rank], facts[rank].local_rank, rank))
    roots = _domains(facts, host_of)
    domain_of: dict[int, int] = {}
    for rank in by_seat:
        domain_of.setdefault(roots[rank], len(domain_of))
    on_host: list[list[RankFacts]] = [[] for _ in order]
    for rank in by_seat:
        on_host[host_of[rank]].append(facts[rank])
    seat_of = {rank: seat for seat, rank in enumerate(by_seat)}
    hosts = [_host(names[identity], on_host[number]) for identity, number in number_of.items()]
    servers = _servers([host_facts[0].boot_id for host_facts in on_host])
    return Topology(
        hosts=tuple(replace(host, server=server) for host, server in zip(hosts, servers, strict=True)),
        host_of=host_of,
        domain_of=tuple(domain_of[root] for root in roots),
        seat_of=tuple(seat_of[rank] for rank in range(len(facts))),
    )


MOST_HOSTS = 4096  # maximum number of hosts of a cluster for planning


def from_cluster(text: str) -> Topology:
    """Return the topology of "TYPE:COUNT", or of "TYPE:COUNT:GPUS" with the first GPUS GPUs of every instance.

    For example, "p5.48xlarge:4" means four p5.48xlarge instances, and "p5.48xlarge:1:4" means half of one. The hosts
    keep the NICs of whole instances. TYPE may be an UltraServer, as in "u-p6e-gb200x72:2": 36 instances in two NVLink
    domains.
    """
    name, *numbers = text.split(":")
    if len(numbers) > 2:
        raise TopologyError(f"cluster {text!r} has more than two numbers; use TYPE:COUNT or TYPE:COUNT:GPUS")
    count, num_used = [*numbers, "", ""][:2]
    if (number := positive_count(count or "1", MOST_HOSTS)) is None:
        raise TopologyError(f"cluster {text!r}: the number of instances must be 1 to {MOST_HOSTS}, e.g. {name}:2")
    ultraserver = find_ultraserver(name)
    instance, per_unit = ultraserver or (_instance(name), 1)
    num_gpus = instance.num_gpus
    if len(numbers) == 2:
        if (used := positive_count(num_used, num_gpus)) is None:
            raise TopologyError(
                f"cluster {text!r}: the number of GPUs per instance must be 1 to {num_gpus}, e.g. {name}:{number}:"
                f"{max(1, num_gpus // 2)}"
            )
        num_gpus = used
    host, domain_size = _host_of(instance), used_domain(instance.nvlink_domain, instance.num_gpus, num_gpus)
    hosts = [replace(host, name=f"{host.name}-{index}") for index in range(number * per_unit)]
    return build([(host, num_gpus, domain_size) for host in hosts])


def positive_count(text: str, most: int) -> int | None:
    """Return the decimal number in `text` if it is 1 to `most`, or None."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= 9
    return int(text) if is_number and 1 <= int(text) <= most else None


def used_domain(domain_size: int, num_gpus: int, num_used: int) -> int:
    """Return the number of used GPUs per NVLink domain if only `num_used` of the `num_gpus` GPUs of a host are used."""
    if domain_size > num_gpus:
        return domain_size // num_gpus * num_used
    return min(domain_size, num_used)


def instance_host(instance_type: str) -> tuple[Host, int, int]:
    """Return a host of an instance type, its number of GPUs, and the number of GPUs per NVLink domain.

    Raise TopologyError if the catalogue does not list the instance type.
    """
    if found := find_ultraserver(instance_type):
        instance, count = found
        raise TopologyError(
            f"instance {instance_type!r} is {count} hosts; use instance: {instance.name} with count: {count} and "
            f"nvlink_domain: {instance.nvlink_domain}, or --cluster {instance_type}:1"
        )
    instance = _instance(instance_type)
    return _host_of(instance), instance.num_gpus, instance.nvlink_domain


def _instance(instance_type: str) -> Instance:
    instance = find_instance(instance_type)
    if instance is None:
        clusters = near_names(instance_type, shipped.names("clusters"), most=1, cutoff=0.75)
        if near := clusters or near_instances(instance_type):
            raise TopologyError(f"instance type {instance_type!r} is not known; did you mean {' or '.join(near)}?")
        raise TopologyError(
            f"instance type {instance_type!r} is not known; use one of "
            f"{', '.join((*INSTANCE_NAMES, *ULTRASERVER_NAMES))}, a cluster file, or one of the shipped clusters "
            f"{', '.join(shipped.names('clusters'))}"
        )
    return instance


def _host_of(instance: Instance) -> Host:
    return Host(
        name=instance.name.split(".")[0],
        device=instance.gpu,
        inside="pcie",
        network=instance.network,
        network_gbits=instance.network_gbits,
        nvlink_gb_per_s=instance.nvlink_gb_per_s or None,
        instance_type=instance.name,
    )


def build(hosts: Sequence[tuple[Host, int, int]], starts: Collection[int] = ()) -> Topology:
    """Build a topology from tuples (host, number of ranks, ranks per NVLink domain). Number the ranks host by host.

    A domain with more ranks than a host spans consecutive hosts of equal sizes. If these hosts do not fill all domains,
    they are divided as evenly as possible over as few domains as can hold them: 128 hosts in racks of 18 are eight
    racks of 16. `starts` are the numbers of hosts that start a new domain in any case. Raise TopologyError if a domain
    would end in the middle of a host.
    """
    if len(hosts) > MOST_HOSTS:
        raise TopologyError(f"the cluster has {len(hosts)} hosts; use at most {MOST_HOSTS}")
    host_of: list[int] = []
    domain_of: list[int] = []
    for number, (host, num_ranks, domain_size) in enumerate(hosts):
        if domain_size > num_ranks and domain_size % num_ranks:
            raise TopologyError(
                f"{host.name}: an NVLink domain of {domain_size} GPUs is not a whole number of hosts with {num_ranks} "
                f"GPUs; use a multiple of {num_ranks}, or at most {num_ranks}"
            )
        host_of += [number] * num_ranks
    firsts = [
        number
        for number in range(len(hosts))
        if number in starts or number == 0 or hosts[number - 1][1:] != hosts[number][1:]
    ]
    for first, end in pairwise([*firsts, len(hosts)]):
        _, num_ranks, domain_size = hosts[first]
        for size in _domain_sizes(end - first, num_ranks, domain_size):
            domain_of += [domain_of[-1] + 1 if domain_of else 0] * size
    return Topology(
        hosts=tuple(host for host, _, _ in hosts),
        host_of=tuple(host_of),
        domain_of=tuple(domain_of),
        seat_of=tuple(range(len(host_of))),
    )


def _domain_sizes(num_hosts: int, num_ranks: int, domain_size: int) -> list[int]:
    """Return the sizes of the NVLink domains of equal hosts, in the order of their ranks."""
    if domain_size <= num_ranks:
        whole, rest = divmod(num_ranks, domain_size)
        return ([domain_size] * whole + [rest] * (rest > 0)) * num_hosts
    num_domains = ceil(num_hosts / (domain_size // num_ranks))
    each, more = divmod(num_hosts, num_domains)
    return [(each + (number < more)) * num_ranks for number in range(num_domains)]


def split(topology: Topology, num_hosts: int, gb_per_s: float | None = None) -> Topology:
    """Split the ranks of one machine, in rank order, into `num_hosts` emulated hosts that communicate over sockets.

    `gb_per_s` is the bandwidth of each host, if it is limited (`emulate_network`).

    Raise TopologyError if the ranks are on several hosts already, or if `num_hosts` does not divide the world size.
    """
    if len(topology.hosts) > 1:
        names = ", ".join(host.name for host in topology.hosts)
        raise TopologyError(
            f"emulate_hosts={num_hosts} splits one machine, but the ranks are on {len(topology.hosts)} hosts "
            f"({names}). Remove emulate_hosts, or start all ranks on one machine."
        )
    if topology.world_size % num_hosts:
        raise TopologyError(
            f"emulate_hosts={num_hosts} does not divide the {topology.world_size} ranks. "
            f"Set emulate_hosts to a divisor of {topology.world_size}."
        )
    host = replace(topology.hosts[0], network="socket", network_gbits=None, ring_gbits=None)
    host_of = tuple(emulated_host(rank, topology.world_size, num_hosts) for rank in range(topology.world_size))
    domains = sorted(set(zip(host_of, topology.domain_of, strict=True)))
    parts = replace(
        topology,
        hosts=tuple(replace(host, name=f"{host.name}/{number}") for number in range(num_hosts)),
        host_of=host_of,
        domain_of=tuple(domains.index(place) for place in zip(host_of, topology.domain_of, strict=True)),
        emulated=True,
    )
    return parts.with_emulated_network(gb_per_s)


def emulated_host(rank: int, world_size: int, num_hosts: int) -> int:
    """Return the number of the emulated host that contains the launcher's `rank`."""
    return rank * num_hosts // world_size


def components(size: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the connected components of the graph with the nodes 0 to size - 1, each in ascending order."""
    parent = list(range(size))
    for a, b in pairs:
        old, new = sorted((_root(parent, a), _root(parent, b)), reverse=True)
        parent[old] = new
    members: dict[int, list[int]] = {}
    for node in range(size):
        members.setdefault(_root(parent, node), []).append(node)
    return tuple(map(tuple, members.values()))


def _root(parent: list[int], node: int) -> int:
    """Return the root of a node of a forest, and shorten the path to it."""
    while parent[node] != node:
        parent[node] = node = parent[parent[node]]
    return node


def _host_names(facts: Sequence[RankFacts], identities: Sequence[str]) -> dict[str, str]:
    """Return a unique name per host: the hostname, with NCCL_HOSTID if set, and with a number if names are equal."""
    stems = {
        identity: f"{fact.hostname}/{fact.nccl_hostid}" if fact.nccl_hostid else fact.hostname
        for fact, identity in zip(facts, identities, strict=True)
    }
    names: dict[str, str] = {}
    for identity in sorted(stems):
        same = [other for other in sorted(stems) if stems[other] == stems[identity]]
        names[identity] = f"{stems[identity]}#{same.index(identity)}" if len(same) > 1 else stems[identity]
    return names


def _servers(boot_ids: Sequence[str]) -> list[str | None]:
    """Return the server of each host, or None for hosts that are alone on a server. Its hosts have equal boot ids."""
    shared = [boot_id for boot_id, count in Counter(boot_ids).items() if boot_id and count > 1]
    return [f"server-{shared.index(boot_id)}" if boot_id in shared else None for boot_id in boot_ids]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders node-2 before node-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _host(name: str, facts: Sequence[RankFacts]) -> Host:
    gpus = [fact.gpu for fact in facts if fact.gpu]
    bus_ids = {gpu.bus_id for gpu in gpus}
    reachable = all(bus_ids - {gpu.bus_id} <= set(gpu.p2p_bus_ids) for gpu in gpus)
    networks = {fact.network for fact in facts}
    instance = find_instance(facts[0].instance_type or "")
    return Host(
        name=name,
        device=gpus[0].name if gpus else "cpu",
        inside="pcie" if gpus and reachable else "shm",
        network=facts[0].network if len(networks) == 1 else "socket",
        network_gbits=facts[0].network_gbits,
        nvlink_gb_per_s=(gpus[0].nvlink_gb_per_s if gpus else None)
        or (instance.nvlink_gb_per_s or None if gpus and instance else None),
        instance_type=instance.name if instance else None,
        sees_one_gpu=any(fact.sees_one_gpu for fact in facts),
        has_one_queue=any(fact.max_connections == "1" for fact in facts),
    )


def _domains(facts: Sequence[RankFacts], host_of: Sequence[int]) -> list[int]:
    """Return one number per rank. Ranks have equal numbers if they are in one NVLink domain."""
    # For each GPU, by the boot id of its server and its bus id: the hosts (such as pods) whose ranks use it.
    hosts_with: dict[tuple[str, str], set[int]] = {}
    for fact, host in zip(facts, host_of, strict=True):
        if fact.gpu:
            hosts_with.setdefault((fact.boot_id, fact.gpu.bus_id), set()).add(host)
    together: dict[object, list[int]] = {}
    for rank, fact in enumerate(facts):
        for hub in _hubs(fact, host_of[rank], hosts_with):
            together.setdefault((host_of[rank], hub), []).append(rank)
        if fact.gpu and fact.gpu.fabric:
            together.setdefault(fact.gpu.fabric, []).append(rank)
    domains = components(len(facts), (pair for ranks in together.values() for pair in pairwise(ranks)))
    domain_of = {rank: number for number, domain in enumerate(domains) for rank in domain}
    return [domain_of[rank] for rank in range(len(facts))]


def _hubs(fact: RankFacts, host: int, hosts_with: Mapping[tuple[str, str], set[int]]) -> set[str]:
    """Return the NVLink hubs of a rank. Two ranks of one host with a common hub are in one NVLink domain.

    A hub is an NVLink switch, or a direct NVLink between two GPUs, named after both GPUs. All ranks on CPU have the
    hub "shared memory".
    """
    gpu = fact.gpu
    if gpu is None:
        return {"shared memory"}
    if gpu.nvlinks is None:  # if NVML does not report NVLinks, use the instance type
        instance = find_instance(fact.instance_type or "")
        return {"switch"} if instance and instance.nvlink_domain > 1 else set()
    hubs = set()
    for remote in gpu.nvlinks:
        owners = hosts_with.get((fact.boot_id, remote), set()) if remote else set()
        if host in owners:
            hubs.add(" ".join(sorted([gpu.bus_id, str(remote)])))
        elif not owners and remote not in gpu.visible_bus_ids:
            hubs.add("switch")  # NCCL also treats a remote end that is not visible as a switch
        # any other link connects to a GPU of another host, or to a GPU without a rank
    return hubs
