"""Measurements of the network: collectives and sends between hosts, for groups of several shapes and sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megabench.calibrate.timers import Bench
from megabench.cost.fabric import KINDS, Kind, kind_name
from megabench.hardware.topology import Topology
from megabench.train.comm_preflight import create_mine

# message sizes in bytes; the fit ignores sizes below 1 MB
_SIZES = {"cuda": [2**20, 2**24, 2**28], "cpu": [2**20, 2**22]}
_COLLECTIVES: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "send")


@dataclass(frozen=True)
class _Shape:
    """Groups of ranks that communicate at once. Each has `ranks_per_host` ranks on each of `num_hosts` hosts."""

    groups: list[list[int]]
    num_hosts: int
    ranks_per_host: int

    @property
    def sizes(self) -> dict[str, float]:
        """The sizes of a measurement."""
        groups_per_host = len(self.groups)  # because every group has ranks on each of the hosts
        return {"hosts": self.num_hosts, "ranks_per_host": self.ranks_per_host, "groups_per_host": groups_per_host}


def between_hosts(bench: Bench, topology: Topology) -> None:
    """Time every kind of collective between hosts, and sends from every rank to its counterpart on the next host."""
    for shape in _shapes(topology):
        mine = create_mine(shape.groups)
        for kind in _COLLECTIVES:
            for num_bytes in _SIZES[bench.device.type]:
                size = len(shape.groups[0])
                whole = torch.zeros(num_bytes // 4 // size * size, device=bench.device)
                operation = _operation(kind, whole, mine) if mine else lambda: None
                bench.seconds(kind_name(kind), operation, bytes=whole.nbytes, **shape.sizes)
    if hosts := _hosts(topology):
        chains = list(zip(*hosts, strict=True))
        sizes = {"hosts": len(hosts), "ranks_per_host": len(chains), "groups_per_host": 1}
        time_sends(bench, chains, _SIZES[bench.device.type], **sizes)


def num_measurements_between_hosts(topology: Topology, device: str) -> int:
    """Return how many measurements `between_hosts` takes."""
    num_kinds = len(_COLLECTIVES) * len(_shapes(topology)) + bool(_hosts(topology))
    return num_kinds * len(_SIZES[device])


def _hosts(topology: Topology) -> list[list[int]]:
    """Return equally many ranks of each host, or none for one host or hosts that share an NVLink domain."""
    hosts = [sorted(ranks) for ranks in topology.ranks_by_host]
    if len(hosts) == 1 or max(topology.node_of) + 1 < len(hosts):
        return []
    fewest = min(map(len, hosts))
    return [ranks[:fewest] for ranks in hosts]


def _shapes(topology: Topology) -> list[_Shape]:
    """Return one group of all ranks, groups of one rank per host, and such groups over two hosts only.

    Groups of different lengths separate the time per hop from the base time.
    """
    hosts = _hosts(topology)
    if not hosts:
        return []
    rings = [list(ring) for ring in zip(*hosts, strict=True)]
    shapes = [_Shape([[rank for ranks in hosts for rank in ranks]], len(hosts), len(rings))]
    if len(rings) > 1:
        shapes.append(_Shape(rings, len(hosts), 1))
    if len(hosts) > 2:
        shapes.append(_Shape([ring[:2] for ring in rings], 2, 1))
    return shapes


def _operation(kind: Kind, whole: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a collective whose larger buffer is `whole`."""
    part = torch.zeros_like(whole[: whole.numel() // group.size()])
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        case "all_to_all":
            received = torch.zeros_like(whole)
            return lambda: dist.all_to_all_single(received, whole, group=group)
        case "send":
            raise AssertionError("a send is no collective")


def time_sends(bench: Bench, chains: Sequence[Sequence[int]], all_bytes: Sequence[int], **sizes: float) -> None:
    """Time sends of several sizes from each rank of a chain to the next, on all chains at once.

    Ranks outside of `chains` take part only in the timing. The measurements get `sizes` in addition to their bytes.
    """
    rank = dist.get_rank()
    chain = next((chain for chain in chains if rank in chain), (rank,))
    at = list(chain).index(rank)
    for num_bytes in all_bytes:
        sent, received = (torch.zeros(num_bytes // 4, device=bench.device) for _ in range(2))
        operations = [dist.P2POp(dist.isend, sent, after) for after in chain[at + 1 : at + 2]]
        operations += [dist.P2POp(dist.irecv, received, before) for before in chain[max(at - 1, 0) : at]]

        def send(operations: list[dist.P2POp] = operations) -> None:
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

        bench.seconds(kind_name("send"), send, bytes=sent.nbytes, **sizes)
