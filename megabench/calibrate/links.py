"""Communication measurements: launches, links inside hosts and between hosts, and interference with compute."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabench.calibrate.collectives import between_hosts, num_measurements_between_hosts, time_sends
from megabench.calibrate.timers import Bench
from megabench.cost import network
from megabench.cost.fabric import Fabric
from megabench.cost.fabric_files import collectives_of
from megabench.cost.profile import LinkCost, Measurement, Profile
from megabench.hardware.topology import Link, Topology
from megabench.models.shape import ModelShape
from megabench.runtime.device import synchronize
from megabench.train.comm_preflight import create_mine

_SIZES = {"cuda": [2**16, 2**20, 2**24, 2**27, 2**29], "cpu": [2**12, 2**16, 2**20, 2**22]}  # message sizes in bytes


def collective_launch(bench: Bench) -> float:
    """Return the host time to launch a tiny collective, in seconds."""
    size = dist.get_world_size()
    part, whole = bench.random(8), bench.random(8 * size)

    def many() -> None:
        for _ in range(20):
            dist.all_gather_into_tensor(whole, part, async_op=True)

    dist.barrier()
    bench.start("collective launch")
    synchronize(bench.device)
    many()
    synchronize(bench.device)
    started = time.perf_counter()
    many()
    seconds = bench.agreed((time.perf_counter() - started) / 20)
    synchronize(bench.device)
    bench.measurements.append(Measurement(kind="collective launch", sizes={}, seconds=seconds))
    return seconds


def interference(bench: Bench, topology: Topology, tokens: int, shape: ModelShape) -> float | None:
    """Return the fraction of overlapped communication time that slows down compute, or None if a host has one rank.

    Matrix products and an all-gather are timed separately and overlapped. The fraction is the overlapped time minus the
    longer separate time, divided by the shorter separate time. All hosts run the all-gather at once.
    """
    if not _overlaps(topology):
        return None
    group = create_mine(topology.ranks_by_host)
    size = dist.get_world_size(group)
    a, b = bench.random(tokens, shape.hidden_size), bench.random(shape.hidden_size, shape.hidden_size)
    part = bench.random(_SIZES[bench.device.type][-2] // 4)
    whole = bench.random(part.numel() * size)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, part, group=group)

    communicate = bench.seconds("gather beside nothing", gather)
    one = bench.seconds("product beside nothing", lambda: a @ b)
    times = max(1, round(communicate / one))

    def products() -> None:
        for _ in range(times):
            a @ b

    def both() -> None:
        work: Any = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
        products()
        work.wait()

    alone, together = bench.seconds("products", products), bench.seconds("products beside a gather", both)
    lost = together - max(alone, communicate)
    return min(1.0, max(0.0, lost / min(alone, communicate)))


def links(bench: Bench, topology: Topology, base: Profile) -> dict[Link, LinkCost]:
    """Return the measured cost of the link inside hosts and of the network between hosts.

    Inside hosts, all-gathers of several sizes run over pairs of ranks and over all ranks of each host. The cost of the
    network is fitted to all kinds of collectives between hosts.
    """
    found: dict[Link, LinkCost] = {}
    if groups := _groups_inside(topology):
        pairs = [ranks[:2] for ranks in groups]
        times = {len(some[0]): _gather_times(bench, some) for some in (pairs, groups)}
        where = network.span(topology, groups)
        assert where.inside
        found[where.inside] = _link_cost(where, where.inside, times, base.links[where.inside])
        time_sends(bench, pairs, _SIZES[bench.device.type])
    between_hosts(bench, topology)
    if collectives := collectives_of(bench.measurements):
        inner = base.model_copy(update={"links": base.links | found})
        link = topology.hosts[0].network
        found[link] = Fabric("megabench calibrate", collectives).profile_on(inner, topology).links[link]
    return found


def num_link_measurements(topology: Topology, device: str) -> int:
    """Return how many measurements `collective_launch`, `interference` and `links` take together."""
    inside = 3 * bool(_groups_inside(topology)) * len(_SIZES[device])  # two all-gathers and one send of each size
    return 1 + 4 * _overlaps(topology) + inside + num_measurements_between_hosts(topology, device)


def _overlaps(topology: Topology) -> bool:
    """Return whether every host has several ranks, whose communication can overlap with compute."""
    return min(map(len, topology.ranks_by_host)) > 1


def _groups_inside(topology: Topology) -> list[list[int]]:
    """Return the ranks of each host that has several, in even numbers."""
    return [sorted(ranks)[: len(ranks) // 2 * 2] for ranks in topology.ranks_by_host if len(ranks) > 1]


def _gather_times(bench: Bench, groups: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Return (total gathered bytes, seconds) for each size, with all groups running simultaneously.

    Ranks outside of `groups` skip the all-gathers and take part only in the timing.
    """
    mine = create_mine(groups)
    found = []
    for num_bytes in _SIZES[bench.device.type]:
        size = len(groups[0])
        part = torch.zeros(num_bytes // 4 // size, device=bench.device)
        whole = torch.zeros(part.numel() * size, device=bench.device)

        def gather(part: Tensor = part, whole: Tensor = whole) -> None:
            if mine is not None:
                dist.all_gather_into_tensor(whole, part, group=mine)

        found.append((float(whole.nbytes), bench.seconds("all-gather", gather, bytes=whole.nbytes, ranks=size)))
    return found


def _link_cost(
    where: network.Span,
    link: Link,
    times: dict[int, list[tuple[float, float]]],
    before: LinkCost,
) -> LinkCost:
    """Return the cost of a link inside hosts.

    `times` maps a number of ranks to the (bytes, seconds) of their all-gathers. The all-gathers of the most
    bytes determine the bandwidth. The all-gathers of the fewest bytes, once over two ranks and once over the largest
    group, determine the base time and the time per hop.
    """
    most = max(times)
    rates = {ranks: _bus_gb_per_s(ranks, found) for ranks, found in times.items()}
    is_known = most > 2
    pair_share = min(1.0, rates[2] / rates[most]) if is_known else before.pair_share
    rate = rates[most] if most > 2 else rates[most] / pair_share
    shortest = {ranks: found[0][1] for ranks, found in times.items()}
    hop = max(0.0, (shortest[most] - shortest[min(times)]) / (most - min(times))) if most > min(times) else 0.0
    hop = hop or before.hop_seconds
    stated = where.host.nvlink_gb_per_s if link == "nvlink" else None
    return LinkCost(
        efficiency=min(1.2, rate / stated) if stated else before.efficiency,
        base_seconds=max(0.0, shortest[min(times)] - hop * (min(times) - 1)),
        hop_seconds=hop,
        gb_per_s=rate,
        pair_share=pair_share,
    )


def _bus_gb_per_s(ranks: int, times: Sequence[tuple[float, float]]) -> float:
    """Return the bandwidth at which each rank receives data in the largest all-gather, in GB/s."""
    num_bytes, seconds = times[-1]
    return num_bytes * (ranks - 1) / ranks / (seconds - min(times[0][1], 0.5 * seconds)) / 1e9
