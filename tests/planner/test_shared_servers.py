"""Costs of hosts that share a server, such as pods of one Kubernetes node."""

from dataclasses import replace

import pytest

from megabench.cost import network
from megabench.cost.fabric import Collective, Fabric
from megabench.cost.geometry import Geometry
from megabench.hardware.gpus import Network
from megabench.hardware.topology import Host, Topology, build
from megabench.parallel.layout import Layout
from tests.planner.jobs import costs, job, zero

HOST = Host("pod", "NVIDIA H100 80GB HBM3", "pcie", "efa", 400.0, 450.0)


def pods(num_servers: int = 1, per_server: int = 4, kind: Network = "efa", is_shared: bool = True) -> Topology:
    """Pods of one GPU. The NICs of a server have 400 Gbit/s, or those of each pod if they share no server."""
    hosts = []
    for server in range(num_servers):
        for pod in range(per_server):
            name = f"server-{server}" if is_shared else None
            hosts.append((replace(HOST, name=f"pod-{server}-{pod}", network=kind, server=name), 1, 1))
    return build(hosts)


def world(topology: Topology) -> network.Span:
    return Geometry.of(topology, Layout(dp=topology.world_size), "topology").world


def gb_per_s(topology: Topology) -> float:
    return network.ring_bandwidth(costs(job(), topology).profile, world(topology)) / 1e9


def test_a_ring_leaves_and_enters_a_server_once_for_each_pod():
    efficiency = costs(job(), pods()).profile.links["efa"].efficiency
    assert gb_per_s(pods(is_shared=False)) == pytest.approx(50 * efficiency)
    assert gb_per_s(pods()) == pytest.approx(50 * efficiency / 4)
    assert gb_per_s(pods(num_servers=2)) == pytest.approx(50 * efficiency / 4)
    assert gb_per_s(pods(num_servers=4, per_server=2)) == pytest.approx(50 * efficiency / 2)


def test_sockets_inside_a_server_use_no_nic():
    """A ring over several servers passes each of them once."""
    sockets = costs(job(), pods()).profile.links["socket"]
    inside = world(pods(kind="socket"))
    assert inside.host.network_gbits is None and inside.sharing == 1
    assert gb_per_s(pods(kind="socket")) == sockets.gb_per_s
    across = world(pods(num_servers=2, kind="socket"))
    assert (across.host.network_gbits, across.sharing) == (400.0, 1)
    # two rings, each with two pods of each server
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert network.span(pods(num_servers=2, kind="socket"), groups).sharing == 2
    # three pairs of a server, two of which share pod 0
    assert network.span(pods(kind="socket"), [[0, 1], [0, 2], [1, 3]]).sharing == 2


def test_a_stage_sends_over_a_part_of_the_nics():
    """Four pods send at the same time, and each GPU uses a quarter of the NICs of the server."""
    alone, shared = (Geometry.of(pods(is_shared=one), Layout(pp=4, dp=1), "topology").pp for one in (False, True))
    profile = costs(job(), pods()).profile
    seconds = [network.send_seconds(profile, where, 5e9, where.nic_ranks) for where in (alone, shared)]
    assert alone.nic_ranks == 1 and shared.nic_ranks == 4
    assert seconds[1] == pytest.approx(4 * seconds[0], rel=0.01)


def test_pods_of_a_server_share_its_memory():
    """Offload takes as long as in one pod with all GPUs, and needs as much host memory."""
    one_pod, alone = build([(replace(HOST, server=None), 4, 4)]), pods(is_shared=False)
    found = {}
    for name, topology in {"one pod": one_pod, "pods": pods(), "alone": alone}.items():
        estimate = costs(job(), topology).estimate(zero(topology, offload="all"))
        found[name] = (estimate.parts["offload"], estimate.host_bytes)
    assert found["pods"] == found["one pod"]
    assert found["alone"][0] < found["pods"][0] and found["alone"][1] == found["pods"][1] / 4


def test_one_pod_with_all_gpus_is_faster_than_four():
    one_pod = build([(replace(HOST, server=None), 4, 4)])
    candidates = {topology: zero(topology, offload="all") for topology in (one_pod, pods(), pods(kind="socket"))}
    steps = [costs(job(), topology).estimate(candidate).step_seconds for topology, candidate in candidates.items()]
    assert steps == sorted(steps)


@pytest.mark.parametrize("kind", ["efa", "socket"])
def test_a_measured_network_of_pods(kind):
    """A plan with collectives that are as fast as expected is the plan without them."""
    topology = pods(kind=kind)
    profile = costs(job(), topology).profile
    collectives = []
    for num_bytes in (1e6, 1.6e7, 2.56e8):
        seconds = network.gather_seconds(profile, world(topology), num_bytes)
        collectives.append(Collective("all_gather", 4, 1, num_bytes, seconds))
    fabric = Fabric("nccl.log", tuple(collectives))
    assert [one.share for one in fabric.bandwidths(profile, topology)] == [pytest.approx(1.0)]
    fitted = fabric.profile_on(profile, topology)
    assert network.ring_bandwidth(fitted, world(topology)) / 1e9 == pytest.approx(gb_per_s(topology), rel=0.02)
