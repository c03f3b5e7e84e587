"""The shortcuts for large clusters of equal hosts, against all groups of the cluster."""

import itertools
from dataclasses import replace

import pytest

from megabench.cost.geometry import Geometry, _equal_hosts
from megabench.hardware.topology import Host, Topology, build, from_cluster
from megabench.parallel.layout import Layout, divisors
from megabench.parallel.placement import place


def layouts(world_size: int) -> list[Layout]:
    sizes = divisors(world_size)
    found = [
        Layout(tp=tp, cp=cp, pp=pp, vp=vp).with_world_size(world_size)
        for tp, cp, pp, vp in itertools.product(sizes, sizes, sizes, (1, 2))
        if world_size % (tp * cp * pp) == 0 and (vp == 1 or pp > 1)
    ]
    assert len(found) > 20
    return found


def pairs_of_gpus(count: int) -> Topology:
    """Hosts of four GPUs in two NVLink domains."""
    host = Host("host", "NVIDIA H100 80GB HBM3", "pcie", "efa", 400.0, 300.0)
    return build([(replace(host, name=f"host-{number}"), 4, 2) for number in range(count)])


@pytest.mark.parametrize("policy", ["topology", "spread-tp", "launcher"])
@pytest.mark.parametrize(
    "topology",
    [from_cluster("p5.48xlarge:4"), from_cluster("p4d.24xlarge:3:6"), from_cluster("g5.48xlarge:2"), pairs_of_gpus(8)],
    ids=["p5", "six-gpus", "g5", "pairs"],
)
def test_spans_of_a_few_groups_are_those_of_all(topology, policy):
    shortcuts = 0
    for layout in layouts(topology.world_size):
        quick = Geometry.of(topology, layout, policy)
        whole = Geometry(place(topology, layout, policy).topology, layout)
        shortcuts += bool(quick.period or quick.part)
        for name in ("tp", "cp", "pp", "replicas", "ends"):
            assert getattr(quick, name) == getattr(whole, name), (layout, name)
        shards = layout.data_parallel * layout.cp // 2
        if shards > 1:
            assert quick.parted_replicas(shards) == whole.parted_replicas(shards), layout
    assert shortcuts


def test_hosts_that_differ_have_no_shortcut():
    topology = pairs_of_gpus(2)
    assert _equal_hosts(topology)
    slower = replace(topology.hosts[1], network_gbits=100.0)
    assert not _equal_hosts(replace(topology, hosts=(topology.hosts[0], slower)))
    assert not _equal_hosts(topology.renumbered([1, 0, *range(2, 8)]))
    assert not _equal_hosts(build([(topology.hosts[0], 4, 2), (topology.hosts[1], 2, 2)]))
