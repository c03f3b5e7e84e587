"""Detect the topology and place the ranks of a run, over the rendezvous store, before any process group exists."""

import os

from megabench.config import ResolvedConfig
from megabench.hardware.facts import read_facts
from megabench.hardware.topology import discover, emulated_host, split
from megabench.parallel.placement import Placement, place
from megabench.runtime.device import gpu_uuid
from megabench.runtime.rendezvous import Rendezvous


def place_ranks(run: ResolvedConfig, rendezvous: Rendezvous) -> Placement:
    """Return the placement of the ranks of `run`. Every rank must call this, and all get the same result.

    Raises PlacementError if strict placement is impossible, and TopologyError if hosts cannot be emulated.
    """
    facts = read_facts(rendezvous.local_rank, gpu_uuid(rendezvous.local_rank) if run.device == "cuda" else None)
    topology = discover(rendezvous.store, facts, rendezvous.rank, rendezvous.world_size)
    if run.emulate_hosts:
        topology = split(topology, run.emulate_hosts)
        split_nccl(emulated_host(rendezvous.rank, rendezvous.world_size, run.emulate_hosts))
    return place(topology, run.layout, run.placement, run.strict_placement)


def split_nccl(number: int) -> None:
    """Make NCCL treat this process as part of host `number`, reached over sockets on the loopback device."""
    os.environ["NCCL_HOSTID"] = f"emulated-{number}"
    os.environ |= {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
