"""Test the network of a run before training: the transport of each process group, and the bandwidth between hosts.

NCCL connects a process group at its first communication and logs the transport, but not the name of the group.
Therefore this module sends the first messages of each kind of group in turn, and reads NCCL's log after each kind.
"""

import atexit
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from megabench.hardware import transport
from megabench.hardware.topology import Topology
from megabench.parallel.axes import AXIS_BY_NAME
from megabench.parallel.layout import Layout
from megabench.parallel.placement import and_more, groups_on, number_ranges
from megabench.record import Group, LinkBandwidth
from megabench.runtime.device import synchronize
from megabench.runtime.messages import publish
from megabench.runtime.process import host_name

_PROBE_BYTES = 8 * 2**20  # large enough that NCCL uses its protocols and channels for large messages
_BANDWIDTH_BYTES = {"cuda": 128 * 2**20, "cpu": 8 * 2**20}
_REPEATS, _IN_A_ROW = 3, 4


@dataclass(frozen=True)
class Network:
    """Result of the test: process groups with their transports, NCCL's number of hosts, bandwidth between hosts.

    `warnings` report transports that do not match the topology.
    """

    groups: list[Group]
    nccl_num_nodes: int | None
    bandwidth: LinkBandwidth | None
    warnings: list[str]


def write_nccl_log(folder: Path | None, rank: int) -> None:
    """Make NCCL log to a file in `folder`, or in a temporary folder, unless the user has configured NCCL's log."""
    if "NCCL_DEBUG_FILE" in os.environ or os.environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        return
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="megabench-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"nccl-rank-{rank}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(path.absolute())}


def nccl_log_path() -> Path | None:
    """Return the file to which NCCL logs in this process, or None if NCCL logs to no file."""
    pattern = os.environ.get("NCCL_DEBUG_FILE")
    host = host_name().split(".")[0]
    return Path(pattern.replace("%h", host).replace("%p", str(os.getpid()))) if pattern else None


def try_out(
    layout: Layout,
    topology: Topology,
    process_groups: Mapping[str, ProcessGroup],
    store: Store,
    device: torch.device,
    nccl_log: Path | None,
) -> Network:
    """Send the first messages of `process_groups`, and read their transports from `nccl_log`.

    Every rank must call this before any other communication. All ranks get the same result.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tail = transport.LogTail(nccl_log)
    heard: dict[str, list[str]] = {}
    unknown: list[str] = []
    for axis in AXIS_BY_NAME:
        if axis in process_groups:
            tail.read_on()
            (_first_sends if axis == "pp" else _first_collectives)(process_groups[axis], device)
            if axis == "cp":  # context parallelism also uses all-to-all
                _first_exchange(process_groups[axis], device)
            said = tail.read_on()
            heard[axis] = said.transports
            unknown += said.unknown
    bandwidth = measure_bandwidth(topology, device) if len(topology.hosts) > 1 else None
    if device.type == "cuda":  # the reported peak memory must not include this test
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    whole = transport.LogTail(nccl_log).read_on()
    nodes = [made.num_nodes for made in whole.communicators if made.num_ranks == world_size]
    mine = {"heard": heard, "unknown": unknown, "nodes": nodes[:1]}
    publish(store, f"network/{rank}", json.dumps(mine))
    everyone = [json.loads(text) for text in store.multi_get([f"network/{other}" for other in range(world_size)])]
    groups: list[Group] = []
    wrong: dict[tuple[str, str], list[Group]] = {}
    for group in groups_on(layout, topology):
        names = [name for member in group.ranks for name in everyone[member]["heard"].get(group.kind, [])]
        transports = transport.in_order(names)
        groups.append(group.model_copy(update={"transport": " + ".join(transports) or None}))
        if complaint := transport.disagreement(group.kind, group.link, transports):
            wrong.setdefault((group.kind, complaint), []).append(group)
    warnings = [
        f"the {kind.upper()} group of ranks {number_ranges(some[0].ranks)}{and_more(some)}: {complaint}"
        for (kind, complaint), some in wrong.items()
    ]
    num_nodes = next((found["nodes"][0] for found in everyone if found["nodes"]), None)
    if num_nodes not in (None, expected := len(set(topology.node_of))):
        warnings.append(f"NCCL detects {num_nodes} hosts, but the topology has {expected}")
    lines = [line for found in everyone for line in found["unknown"]]
    if lines:
        warnings.append(f"{len(lines)} lines of NCCL's log have an unknown format, e.g. {lines[0]!r}")
    return Network(groups, num_nodes, bandwidth, warnings)


def _first_collectives(group: ProcessGroup, device: torch.device) -> None:
    """Run each kind of collective that engines use once, because NCCL may choose different transports for them."""
    size = group.size()
    part = torch.zeros(_PROBE_BYTES // 4 // size, device=device)
    whole = torch.zeros(part.numel() * size, device=device)
    dist.all_gather_into_tensor(whole, part, group=group)
    dist.reduce_scatter_tensor(part, whole, group=group)
    dist.all_reduce(whole, group=group)
    synchronize(device)


def _first_exchange(group: ProcessGroup, device: torch.device) -> None:
    whole = torch.zeros(_PROBE_BYTES // 4 // group.size() * group.size(), device=device)
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    synchronize(device)


def _first_sends(group: ProcessGroup, device: torch.device) -> None:
    """Send to the next and the previous pipeline stage, as activations and gradients are sent."""
    before, after = group.rank() - 1, group.rank() + 1
    operations = [
        dist.P2POp(operation, torch.zeros(_PROBE_BYTES // 4, device=device), group=group, group_peer=peer)
        for peer in (before, after)
        if 0 <= peer < group.size()
        for operation in (dist.isend, dist.irecv)
    ]
    _finish(operations)
    synchronize(device)


def _finish(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def measure_bandwidth(topology: Topology, device: torch.device) -> LinkBandwidth:
    """Measure the bandwidth between hosts for one ring of all ranks, one pair of ranks, and one ring per local rank.

    Messages between all pairs at once are not measured: over the sockets of emulated hosts, they reached less bandwidth
    than one ring.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    numel = _BANDWIDTH_BYTES[device.type] // 4 // world_size * world_size
    whole = torch.zeros(numel, device=device)
    part = whole[: numel // world_size].clone()
    received = torch.empty_like(whole)
    hosts = topology.ranks_by_host
    sender, receiver = hosts[0][0], hosts[1][0]

    def send() -> None:
        if rank == sender:
            _finish([dist.P2POp(dist.isend, whole, receiver)])
        elif rank == receiver:
            _finish([dist.P2POp(dist.irecv, received, sender)])

    gather_seconds = _time(lambda: dist.all_gather_into_tensor(whole, part), device)
    send_seconds = _time(send, device)
    num_bytes = numel * 4
    one_ring = num_bytes * (world_size - 1) / world_size / gather_seconds / 1e9
    return LinkBandwidth(
        all_gather_gb_per_s=one_ring,
        send_recv_gb_per_s=num_bytes / send_seconds / 1e9,
        all_rings_gb_per_s=_all_rings(hosts, whole, device) if min(map(len, hosts)) > 1 else one_ring,
        num_bytes=num_bytes,
    )


def _all_rings(hosts: Sequence[Sequence[int]], whole: torch.Tensor, device: torch.device) -> float:
    """Return the GB/s that a host sends while the ranks with equal local rank all-gather, all local ranks at once."""
    rings = list(zip(*hosts, strict=False))  # a local rank takes part only if every host has this local rank
    mine = create_mine(rings)
    part = whole[: whole.numel() // len(rings) // len(hosts)]
    gathered = whole[: part.numel() * len(hosts)].clone()

    def gather() -> None:
        if mine is not None:
            dist.all_gather_into_tensor(gathered, part, group=mine)

    seconds = _time(gather, device)
    if mine is not None:
        dist.destroy_process_group(mine)
    return part.numel() * 4 * (len(hosts) - 1) * len(rings) / seconds / 1e9


def _time(operation: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of `operation` on the slowest rank.

    Operations run back to back, as in training. A first operation, which connects the ranks, is not timed.
    """
    operation()
    seconds = []
    for _ in range(_REPEATS):
        dist.barrier()
        synchronize(device)
        started = time.perf_counter()
        for _ in range(_IN_A_ROW):
            operation()
        synchronize(device)
        seconds.append((time.perf_counter() - started) / _IN_A_ROW)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def describe(groups: Sequence[Group]) -> list[str]:
    """Return one line for each kind of group, e.g. "tp 2 × 4 ranks over nvlink (P2P/CUMEM)"."""
    by_kind: dict[tuple[str, str, str], list[Group]] = {}
    for group in groups:
        by_kind.setdefault((group.kind, group.link or "?", group.transport or ""), []).append(group)
    return [
        f"{kind} {len(same)} × {len(same[0].ranks)} ranks over {link}" + (f" ({name})" if name else "")
        for (kind, link, name), same in by_kind.items()
    ]


def create_mine(groups: Sequence[Sequence[int]]) -> ProcessGroup | None:
    """Create all `groups`, and return the one that contains this rank, or None. Every rank must call this."""
    made: list[tuple[Sequence[int], Any]] = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)
