"""Hosts that share a server: several pods on one Kubernetes node, in cluster files and as ranks report them."""

from pathlib import Path

import pytest

from megabench.config.clusters import read_cluster
from megabench.hardware.topology import Topology, from_facts
from tests.hardware.test_topology import changed, four_pods, one_pod


def cluster_file(folder: Path, *hosts: str) -> Topology:
    path = folder / "cluster.yaml"
    path.write_text("hosts:\n" + "".join(f"  - {{{host}}}\n" for host in hosts))
    return read_cluster(str(path))


def servers(topology: Topology) -> list[str | None]:
    return [host.server for host in topology.hosts]


def test_the_shipped_pods_share_one_server():
    pods = read_cluster("one-gpu-pods")
    assert servers(pods) == ["server-0"] * 4 and pods.ranks_per_server == 4
    assert pods.hosts_in_words == "4 hosts on 1 server"
    assert pods.count_links() == {"socket": 6} and [nics.num_ranks for nics in pods.nics] == [4]


def test_each_entry_has_servers_of_its_own(tmp_path):
    cluster = cluster_file(
        tmp_path, "count: 3, hosts_per_server: 2, num_gpus: 1", "count: 1", "count: 2, hosts_per_server: 2, num_gpus: 2"
    )
    assert servers(cluster) == ["server-0", "server-0", "server-1", None, "server-2", "server-2"]
    assert [nics.num_ranks for nics in cluster.nics] == [2, 1, 8, 4]
    assert cluster.hosts_in_words == "6 hosts on 4 servers" and cluster.ranks_per_server == 8


def test_pods_of_an_instance_divide_its_gpus_and_share_its_nics(tmp_path):
    pods = cluster_file(tmp_path, "instance: p4d.24xlarge, count: 8, hosts_per_server: 4")
    assert pods.world_size == 16 and [len(ranks) for ranks in pods.ranks_by_domain] == [2] * 8
    assert [(nics.num_ranks, nics.host.network_gbits) for nics in pods.nics] == [(8, 400.0)] * 2
    trays = cluster_file(tmp_path, "instance: a4x-highgpu-4g, count: 4, hosts_per_server: 4")
    assert [len(ranks) for ranks in trays.ranks_by_domain] == [1] * 4, "no NVLink between pods, also not in a rack"


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("hosts_per_server: 0", r"hosts_per_server=0"),
        (
            "instance: p4d.24xlarge, hosts_per_server: 4, num_gpus: 4",
            r"hosts_per_server=4 with 4 GPUs each exceeds the 8",
        ),
        ("hosts_per_server: true", r"hosts_per_server=True is not valid: input should be a valid integer$"),
        ("gpu: NVIDIA H100, count: 4, hosts_per_server: 4", r"Set num_gpus, e\.g\. num_gpus: 1\.$"),
        ("instance: p4d.24xlarge, num_gpus: 16", r"num_gpus=16 exceeds the 8 GPUs of p4d.24xlarge\. Use .* at most 8,"),
        ("network_gbits: .inf", r"network_gbits=inf is not valid: input should be a finite number$"),
        ("hosts_per_server: 4, num_gpus: 1, nvlink_domain: 4", r"Use an nvlink_domain of at most 1\."),
    ],
)
def test_impossible_hosts_are_refused(tmp_path, host, message):
    with pytest.raises(ValueError, match=rf"cluster.yaml: hosts\[0\].*{message}"):
        cluster_file(tmp_path, host)


def test_pods_with_one_boot_id_share_a_server():
    assert servers(from_facts(four_pods())) == ["server-0"] * 4
    assert servers(from_facts(one_pod())) == [None]
    apart = [changed(fact, boot_id=f"boot-{number // 2}") for number, fact in enumerate(four_pods())]
    assert servers(from_facts(apart)) == ["server-0", "server-0", "server-1", "server-1"]
    unknown = [changed(fact, boot_id="") for fact in four_pods()]
    assert servers(from_facts(unknown)) == [None] * 4
