"""Jobs, clusters and costs that the planner's tests share."""

from dataclasses import replace
from functools import cache

from megabench.config.clusters import read_cluster
from megabench.cost.job import Candidate, Job
from megabench.cost.profile import profile_for
from megabench.hardware.topology import Host, Network, Topology, build
from megabench.models.find import find_model
from megabench.parallel.layout import Layout
from megabench.planner.costs import Costs
from megabench.planner.engines.megatron_memory import MegatronVariant
from megabench.planner.engines.sharding import Sharding


def job(model: str = "llama3-8b", seq_length: int = 4096, global_batch: int = 64, **settings) -> Job:
    return Job(find_model(model), seq_length, global_batch, **settings)


@cache
def cluster(text: str = "p5.48xlarge:2") -> Topology:
    return read_cluster(text)


def costs(job: Job, topology: Topology) -> Costs:
    return Costs(job, topology, profile_for(topology.hosts[0].device))


def megatron(topology: Topology, micro_batch: int = 1, **sizes: int) -> Candidate:
    return Candidate("megatron", Layout(**sizes).with_world_size(topology.world_size), micro_batch, MegatronVariant())


def zero(topology: Topology, stage: int = 3, micro_batch: int = 1, **settings) -> Candidate:
    return Candidate("deepspeed", Layout(dp=topology.world_size), micro_batch, Sharding(stage, **settings))


def hosts(
    count: int, gpus: int, network_gbits: float = 3200.0, nvlink_gb_per_s: float = 450.0, network: Network = "efa"
) -> Topology:
    host = Host("host", "NVIDIA H100 80GB HBM3", "pcie", network, network_gbits, nvlink_gb_per_s)
    return build([(replace(host, name=f"host-{number}"), gpus, gpus) for number in range(count)])
