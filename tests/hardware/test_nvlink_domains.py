"""NVLink domains across hosts: NVL72 racks, in the catalogue and in cluster files."""

from pathlib import Path

import pytest

from megabench.config.clusters import read_cluster
from megabench.cost.geometry import Geometry
from megabench.cost.network import span
from megabench.hardware.topology import Host, Topology, build, from_cluster
from megabench.parallel.layout import Layout

HOST = Host("tray", "NVIDIA GB200", "pcie", "infiniband", 1600.0, 900.0)


def domain_sizes(topology: Topology) -> list[int]:
    return [len(ranks) for ranks in topology.ranks_by_domain]


def cluster_file(folder: Path, *hosts: str) -> Topology:
    path = folder / "cluster.yaml"
    path.write_text("hosts:\n" + "".join(f"  - {{{host}}}\n" for host in hosts))
    return read_cluster(str(path))


def test_a_rack_is_one_domain():
    topology = from_cluster("p6e-gb200.36xlarge:18")
    assert domain_sizes(topology) == [72] and len(topology.hosts) == 18
    assert topology.link(0, 71) == "nvlink" and topology.count_links() == {"nvlink": 72 * 71 // 2}
    assert set(topology.node_of) == {0}


def test_a_second_rack_is_a_second_domain():
    topology = from_cluster("Standard_ND128isr_NDR_GB200_v6:36")
    assert domain_sizes(topology) == [72, 72]
    assert topology.link(0, 71) == "nvlink" and topology.link(71, 72) == "infiniband"
    assert topology.node_of == (0,) * 72 + (1,) * 72


def test_hosts_that_do_not_fill_their_racks_are_divided_evenly():
    assert domain_sizes(from_cluster("Standard_ND128isr_NDR_GB200_v6:128")) == [64] * 8
    assert domain_sizes(from_cluster("Standard_ND128isr_NDR_GB200_v6:126")) == [72] * 7
    assert domain_sizes(from_cluster("Standard_ND128isr_NDR_GB200_v6:19")) == [40, 36]


def test_half_of_every_host_of_a_rack():
    topology = from_cluster("a4x-highgpu-4g:36:2")
    assert domain_sizes(topology) == [36, 36] and topology.hosts[0].network_gbits == 1600


def test_ultraservers_are_racks():
    topology = from_cluster("u-p6e-gb200x36:2")
    assert domain_sizes(topology) == [36, 36] and len(topology.hosts) == 18
    assert topology.hosts[17].name == "p6e-gb200-17"
    assert domain_sizes(from_cluster("u-p6e-gb200x72")) == [72]
    with pytest.raises(ValueError, match="the cluster has 4104 hosts; use at most 4096"):
        from_cluster("u-p6e-gb200x72:228")


def test_half_of_an_ordinary_instance_keeps_its_domain_inside():
    assert domain_sizes(from_cluster("p5.48xlarge:2:4")) == [4, 4]


def test_without_shared_domains_nodes_are_hosts():
    topology = build([(HOST, 4, 2), (HOST, 4, 1), (HOST, 2, 2)])
    assert topology.node_of == topology.host_of and len(topology.ranks_by_domain) == 2 + 4 + 1


def test_hosts_of_other_sizes_start_a_new_domain():
    assert domain_sizes(build([(HOST, 4, 8), (HOST, 4, 8), (HOST, 4, 8), (HOST, 2, 8), (HOST, 2, 2)])) == [8, 4, 2, 2]


def test_a_domain_ends_between_hosts():
    with pytest.raises(ValueError) as refused:
        build([(HOST, 4, 70)])
    assert str(refused.value) == (
        "tray: an NVLink domain of 70 GPUs is not a whole number of hosts with 4 GPUs; "
        "use a multiple of 4, or at most 4"
    )


def test_cluster_files(tmp_path):
    rack = "gpu: NVIDIA GB200, num_gpus: 4, nvlink_domain: 72, nvlink_gb_per_s: 900, network: infiniband"
    assert domain_sizes(cluster_file(tmp_path, f"name: tray, count: 36, {rack}")) == [72, 72]
    # the hosts of each entry have domains of their own
    assert domain_sizes(cluster_file(tmp_path, f"count: 12, {rack}", f"count: 18, {rack}")) == [48, 72]
    assert domain_sizes(cluster_file(tmp_path, "instance: a4x-highgpu-4g, count: 18")) == [72]
    assert domain_sizes(cluster_file(tmp_path, "instance: a4x-highgpu-4g, count: 18, nvlink_domain: 36")) == [36, 36]
    assert domain_sizes(cluster_file(tmp_path, "instance: p5.48xlarge, count: 2, num_gpus: 4")) == [4, 4]
    assert domain_sizes(cluster_file(tmp_path, "num_gpus: 16, count: 2")) == [16, 16]
    with pytest.raises(ValueError, match="host-0: an NVLink domain of 70 GPUs is not a whole number of hosts with 4"):
        cluster_file(tmp_path, "num_gpus: 4, nvlink_domain: 70")
    with pytest.raises(ValueError, match="'u-p6e-gb200x72' is 18 hosts; use instance: p6e-gb200"):
        cluster_file(tmp_path, "instance: u-p6e-gb200x72")


def test_hosts_know_their_instance_type(tmp_path):
    assert from_cluster("nd96isr_h100_v5:1").hosts[0].instance_type == "Standard_ND96isr_H100_v5"
    assert cluster_file(tmp_path, "instance: p5.48xlarge, network_gbits: 100").hosts[0].instance_type == "p5.48xlarge"
    assert cluster_file(tmp_path, "instance: p5.48xlarge, gpu: NVIDIA H200").hosts[0].instance_type is None


def test_costs_count_a_rack_as_one_node_and_its_hosts_as_hosts():
    racks = from_cluster("Standard_ND128isr_NDR_GB200_v6:36")
    geometry = Geometry.of(racks, Layout(dp=144), "topology")
    world = geometry.world
    assert (geometry.ranks_per_server, world.nic_ranks) == (4, 72)  # a host's memory serves four GPUs
    assert (world.hosts, world.inside, world.across) == (2, "nvlink", "infiniband")
    assert world.host.network_gbits == 18 * racks.hosts[0].network_gbits
    rack = Geometry.of(from_cluster("Standard_ND128isr_NDR_GB200_v6:18"), Layout(dp=72), "topology").world
    assert (rack.hosts, rack.inside, rack.across) == (1, "nvlink", None)


def unequal_racks() -> Topology:
    """A full rack and one with two hosts."""
    return build([(HOST, 4, 72)] * 20, starts=[18])


def test_a_ring_over_unequal_racks_is_limited_by_the_smallest():
    world = Geometry.of(unequal_racks(), Layout(dp=80), "topology").world
    assert (world.sharing, world.nic_ranks, world.host.network_gbits) == (1, 8, 2 * 1600.0)


def test_groups_and_nics_are_counted_in_the_same_rack():
    """40 pairs of ranks: 32 are inside the full rack, and eight connect its last eight ranks with the small rack."""
    racks = unequal_racks()
    assert domain_sizes(racks) == [72, 8]
    pairs = span(racks, ((rank, rank + 8) for start in range(0, 80, 16) for rank in range(start, start + 8)))
    assert (pairs.sharing, pairs.nic_ranks, pairs.host.network_gbits) == (8, 8, 2 * 1600.0)
    # 72 groups leave the full rack, and eight of them go to the small one
    third = build([(HOST, 4, 72)] * 38, starts=[18, 36])
    groups = span(third, (range(rank, 152, 72) for rank in range(72)))
    assert groups.nic_load == 72 / (18 * 1600.0) == 8 / (2 * 1600.0)
