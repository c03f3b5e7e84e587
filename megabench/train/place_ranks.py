"""Where the ranks of a run sit: found out and decided over the store, before any process group exists."""

import os

from megabench.config import ResolvedConfig
from megabench.hardware.facts import read_facts
from megabench.hardware.topology import discover, emulated_host, split
from megabench.parallel.placement import Placement, place
from megabench.runtime.device import gpu_uuid
from megabench.runtime.rendezvous import Rendezvous


def place_ranks(run: ResolvedConfig, rendezvous: Rendezvous) -> Placement:
    """The placement of `run`, the same on every rank; each must call it.

    Raises PlacementError where strict placement cannot be had, TopologyError where hosts cannot be emulated.
    """
    facts = read_facts(rendezvous.local_rank, gpu_uuid(rendezvous.local_rank) if run.device == "cuda" else None)
    topology = discover(rendezvous.store, facts, rendezvous.rank, rendezvous.world_size)
    if run.emulate_hosts:
        topology = split(topology, run.emulate_hosts)
        split_nccl(emulated_host(rendezvous.rank, rendezvous.world_size, run.emulate_hosts))
    return place(topology, run.layout, run.placement, run.strict_placement)


def split_nccl(number: int) -> None:
    """Makes NCCL take this process for one of host `number`, which others reach by sockets over the loopback device."""
    os.environ["NCCL_HOSTID"] = f"emulated-{number}"
    os.environ |= {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
