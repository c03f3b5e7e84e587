"""Set up the process of a rank before any process group exists: environment variables, threads and placement."""

import os

import torch

from megabench.config import ResolvedConfig
from megabench.hardware.facts import read_facts
from megabench.hardware.topology import discover, emulated_host, split
from megabench.parallel.placement import Placement, place
from megabench.runtime import net_plugin
from megabench.runtime.device import gpu_uuid
from megabench.runtime.rendezvous import Rendezvous, share_of_cores


def set_environment(run: ResolvedConfig) -> None:
    """Set the engine's environment variables before CUDA starts, unless the user has set them."""
    if run.device == "cuda":
        for name, value in run.spec.environment(run).items():
            os.environ.setdefault(name, value)


def settle(run: ResolvedConfig, placement: Placement) -> tuple[ResolvedConfig, str | None]:
    """Return the run with the values of settings that depend on the links between its GPUs, and a sentence about them.

    The sentence is None if there is nothing to say. All ranks get the same result. Raises ConfigError if a given value
    does not work on these links.
    """
    if run.device != "cuda":
        return run, None
    values, sentence = run.spec.settle(run, placement.topology)
    return run.model_copy(update={"own": run.own.model_copy(update=dict(values))}), sentence


def set_threads(run: ResolvedConfig) -> None:
    """Divide the host's cores among its processes if their optimizers run on the host.

    torchrun gives each process one thread. Libraries that are loaded later read the number of threads from the
    environment.
    """
    uses_host = run.device == "cuda" and run.spec.uses_host(run.options)
    if uses_host and os.environ.get("OMP_NUM_THREADS") in (None, "1"):
        number = share_of_cores()
        torch.set_num_threads(number)
        os.environ["OMP_NUM_THREADS"] = str(number)  # DeepSpeed's CPUAdam is loaded later


def place_ranks(run: ResolvedConfig, rendezvous: Rendezvous) -> Placement:
    """Return the placement of the ranks of `run`. Every rank must call this, and all get the same result.

    Raises PlacementError if strict placement is impossible, and TopologyError if hosts cannot be emulated.
    """
    facts = read_facts(rendezvous.local_rank, gpu_uuid(rendezvous.gpu) if run.device == "cuda" else None)
    topology = discover(rendezvous.store, facts, rendezvous.rank, rendezvous.world_size)
    if run.emulate_hosts:
        topology = split(topology, run.emulate_hosts)
        split_nccl(emulated_host(rendezvous.rank, rendezvous.world_size, run.emulate_hosts))
    return place(topology, run.layout, run.placement, run.strict_placement)


def split_nccl(number: int) -> None:
    """Make NCCL treat this process as part of host `number`.

    Other hosts are reached over sockets on the loopback device, or over the net plugin if the supervisor has set it.
    """
    network = net_plugin.NAME if net_plugin.SCHEDULE_VARIABLE in os.environ else "Socket"
    os.environ |= {"NCCL_HOSTID": f"emulated-{number}", "NCCL_NET": network, "NCCL_IB_DISABLE": "1"}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
