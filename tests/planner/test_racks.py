"""504, 512 and 576 GB200s: seven full racks, eight racks of 16 of the 18 hosts, and eight full racks."""

import pytest

from megabench.cost.job import Candidate
from megabench.hardware.topology import Topology
from megabench.parallel.layout import Layout
from megabench.planner.engines.sharding import Sharding
from megabench.planner.search import plan
from tests.planner.jobs import cluster, costs, job, megatron

INSTANCES = ["Standard_ND128isr_NDR_GB200_v6", "p6e-gb200.36xlarge"]  # with InfiniBand and with EFA
NUM_HOSTS = (126, 128, 144)


def fsdp(topology: Topology) -> Candidate:
    return Candidate("fsdp", Layout(dp=topology.world_size), 1, Sharding(3))


def tp4(topology: Topology) -> Candidate:
    return megatron(topology, tp=4)


def tp2_pp4(topology: Topology) -> Candidate:
    return megatron(topology, tp=2, pp=4)


@pytest.mark.parametrize("instance", INSTANCES)
@pytest.mark.parametrize("layout", [fsdp, tp4, tp2_pp4])
def test_more_gpus_are_not_slower(instance, layout):
    """With one sequence per GPU, the throughput grows with the number of GPUs."""
    throughputs = []
    for count in NUM_HOSTS:
        topology = cluster(f"{instance}:{count}")
        work = job("llama3-70b", 8192, topology.world_size)
        throughputs.append(work.tokens / costs(work, topology).estimate(layout(topology)).step_seconds)
    assert throughputs == sorted(throughputs)


@pytest.mark.parametrize("instance", INSTANCES)
def test_plans_for_more_gpus_are_not_slower(instance):
    """512 GPUs are 1.6% more than 504, but do not divide into pipelines of 7 or 9 stages, which can cost up to 1%."""
    throughputs = []
    for count in NUM_HOSTS:
        topology = cluster(f"{instance}:{count}")
        work = job("llama3-70b", 8192, 2 * topology.world_size)
        best = plan(work, topology, costs(work, topology).profile, keep=1).ranked[0]
        throughputs.append(work.tokens / best.step_seconds)
    assert throughputs[1] > 0.99 * throughputs[0] and throughputs[2] > 1.1 * throughputs[1]
