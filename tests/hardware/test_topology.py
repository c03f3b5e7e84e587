"""Hosts and NVLink domains from what ranks tell of themselves: recorded facts of real GPUs, and changes to them."""

import json
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megabench.hardware.facts import GpuFacts, RankFacts, read_facts, read_network, seen_by_cuda
from megabench.hardware.topology import Topology, TopologyError, from_cluster, from_facts
from megabench.runtime.rendezvous import Rendezvous

RECORDED = Path(__file__).parent / "recorded"


def one_pod() -> list[RankFacts]:
    """Four H200s of one host behind NVSwitches, as NVML told of them."""
    return [RankFacts.model_validate(fact) for fact in json.loads((RECORDED / "h200x4-one-pod.json").read_text())]


def four_pods() -> list[RankFacts]:
    """The same GPUs handed out to four pods: the boot id stays, hostname, /dev/shm and what can be seen do not."""
    return [
        changed(
            fact, gpu={"visible_bus_ids": (bus_id(fact),), "p2p_bus_ids": ()}, hostname=f"pod-{n}", shm_device=40 + n
        )
        for n, fact in enumerate(one_pod())
    ]


def bus_id(fact: RankFacts) -> str:
    assert fact.gpu
    return fact.gpu.bus_id


def changed(fact: RankFacts, gpu: dict | None = None, **fields: object) -> RankFacts:
    if gpu:
        assert fact.gpu
        fields["gpu"] = fact.gpu.model_copy(update=gpu)
    return fact.model_copy(update=fields)


def shape(topology: Topology) -> tuple[list[list[int]], list[list[int]]]:
    return topology.ranks_by_host, topology.ranks_by_domain


def test_one_pod_is_one_domain():
    topology = from_facts(one_pod())
    assert shape(topology) == ([[0, 1, 2, 3]], [[0, 1, 2, 3]])
    assert topology.link(0, 3) == "nvlink" and topology.hosts[0].device == "NVIDIA H200"


def test_two_ranks_on_one_gpu_are_refused():
    facts = one_pod()
    with pytest.raises(TopologyError, match=r"ranks 1 and 2 use the same GPU of .*set LOCAL_RANK"):
        from_facts([*facts[:2], facts[1], facts[3]])


@pytest.mark.parametrize(("num_visible", "gpu"), [(1, 0), (8, 3)])
def test_a_process_that_sees_one_gpu_uses_it(monkeypatch, num_visible, gpu):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_visible)
    assert Rendezvous(HashStore(), rank=3, world_size=4, local_rank=3, local_world_size=4).gpu == gpu


def test_pods_of_one_gpu_have_links_but_no_domain():
    facts = four_pods()
    assert len({fact.boot_id for fact in facts}) == 1 and all(fact.gpu and fact.gpu.nvlinks for fact in facts)
    topology = from_facts(facts)
    assert shape(topology) == ([[0], [1], [2], [3]],) * 2
    assert topology.count_links() == {"socket": 6}


@pytest.mark.parametrize("shared", ["hostname", "shm_device"])
def test_both_hostname_and_shm_make_a_host(shared):
    first = four_pods()[0]
    topology = from_facts([changed(fact, **{shared: getattr(first, shared)}) for fact in four_pods()])
    assert len(topology.hosts) == 4 and len({host.name for host in topology.hosts}) == 4


def test_nccl_hostid_replaces_the_hostname():
    facts = [changed(fact, nccl_hostid=f"half-{n // 2}") for n, fact in enumerate(one_pod())]
    assert shape(from_facts(facts)) == ([[0, 1], [2, 3]], [[0, 1], [2, 3]])
    joined = [changed(fact, nccl_hostid="one", shm_device=1) for fact in four_pods()]
    assert len(from_facts(joined).hosts) == 1


def wired(facts: list[RankFacts], wires: list[tuple[int, int]]) -> list[RankFacts]:
    """The same GPUs, joined by direct wires in place of switches."""
    ends: dict[int, list[str]] = {n: [] for n in range(len(facts))}
    for a, b in wires:
        ends[a].append(bus_id(facts[b]))
        ends[b].append(bus_id(facts[a]))
    return [changed(fact, gpu={"nvlinks": tuple(ends[n])}) for n, fact in enumerate(facts)]


def test_bridges_join_pairs():
    topology = from_facts(wired(one_pod(), [(0, 1), (2, 3)]))
    assert topology.ranks_by_domain == [[0, 1], [2, 3]] and topology.link(1, 2) == "pcie"


def test_a_mesh_is_one_domain():
    assert from_facts(wired(one_pod(), [(0, 1), (1, 2), (2, 3)])).ranks_by_domain == [[0, 1, 2, 3]]


def test_wires_to_gpus_of_other_pods_do_not_count():
    topology = from_facts(wired(four_pods(), [(0, 1), (1, 2), (2, 3)]))
    assert topology.ranks_by_domain == [[0], [1], [2], [3]]


def test_wires_to_gpus_that_take_no_part_do_not_count():
    meshed = wired(one_pod(), [(0, 2), (1, 3)])
    assert from_facts(meshed[:2]).ranks_by_domain == [[0], [1]], "2 and 3 can be seen, so they are no switch"


def test_links_that_are_down():
    facts = [changed(fact, gpu={"nvlinks": ()}) for fact in one_pod()]
    assert from_facts(facts).link(0, 1) == "pcie"
    blocked = [changed(fact, gpu={"p2p_bus_ids": ()}) for fact in facts]
    assert from_facts(blocked).link(0, 1) == "shm"


@pytest.mark.parametrize(("instance_type", "domains"), [("p5e.48xlarge", 1), ("g6e.48xlarge", 4), (None, 4)])
def test_where_nvml_is_silent_the_instance_type_tells(instance_type, domains):
    facts = [changed(fact, gpu={"nvlinks": None}, instance_type=instance_type) for fact in one_pod()]
    assert len(from_facts(facts).ranks_by_domain) == domains


def test_a_multi_node_fabric_is_one_domain_over_hosts():
    facts = [changed(fact, gpu={"fabric": ("c0ffee", n // 3)}) for n, fact in enumerate(four_pods())]
    topology = from_facts(facts)
    assert len(topology.hosts) == 4 and topology.ranks_by_domain == [[0, 1, 2], [3]]
    assert topology.link(0, 1) == "nvlink" and topology.link(0, 3) == "socket"


def test_cpu_ranks_share_memory():
    topology = from_facts([RankFacts(hostname=f"node-{n // 2}", boot_id="b", local_rank=n % 2) for n in range(4)])
    assert topology.ranks_by_domain == [[0, 1], [2, 3]]
    assert (topology.link(0, 1), topology.link(1, 2)) == ("shm", "socket")


def test_hosts_count_as_people_do():
    topology = from_facts([RankFacts(hostname=name, boot_id="b") for name in ("node-10", "node-2", "node-1")])
    assert [host.name for host in topology.hosts] == ["node-1", "node-2", "node-10"]
    assert topology.host_of == (2, 1, 0)


@pytest.mark.parametrize(("networks", "link"), [(("efa", "efa"), "efa"), (("efa", "infiniband"), "socket")])
def test_hosts_talk_over_what_both_have(networks, link):
    facts = [RankFacts(hostname=f"n{n}", boot_id="b", network=kind) for n, kind in enumerate(networks)]
    assert from_facts(facts).link(0, 1) == link


def test_one_process_decides_for_its_host():
    facts = [
        RankFacts(hostname=f"n{n // 2}", boot_id="b", sees_one_gpu=n == 1, max_connections="1" if n == 3 else "8")
        for n in range(4)
    ]
    hosts = from_facts(facts).hosts
    assert [(host.sees_one_gpu, host.has_one_queue) for host in hosts] == [(True, False), (False, True)]


def test_facts_of_this_process(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr("megabench.hardware.facts.visible_gpus", lambda: [("GPU-1", "NVIDIA H200")])
    fact = read_facts(3, None)
    assert fact.hostname and fact.boot_id and fact.local_rank == 3 and fact.gpu is None
    assert fact.sees_one_gpu and fact.max_connections == "1"
    assert RankFacts.model_validate_json(fact.model_dump_json()) == fact


def device(sys: Path, name: str, driver: str, state: str, rate: str) -> None:
    port = sys / "class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (sys / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (port / "state").write_text(state)
    (port / "rate").write_text(rate)
    (sys / "class/infiniband" / name / "device").mkdir()
    (sys / "class/infiniband" / name / "device/driver").symlink_to(sys / "drivers" / driver)


def interface(sys: Path, name: str, state: str, speed: str) -> None:
    folder = sys / "class/net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(state)
    (folder / "speed").write_text(speed)


def test_networks_by_their_device_files(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    assert read_network(tmp_path) == ("socket", None)
    interface(tmp_path, "lo", "up", "100000")
    interface(tmp_path, "docker0", "up", "10000")
    interface(tmp_path, "eth0", "up", "25000")
    interface(tmp_path, "eth1", "down", "25000")
    assert read_network(tmp_path) == ("socket", 25.0)
    device(tmp_path, "mlx5_0", "mlx5_core", "4: ACTIVE", "400 Gb/sec (4X NDR)")
    device(tmp_path, "mlx5_1", "mlx5_core", "1: DOWN", "400 Gb/sec (4X NDR)")
    assert read_network(tmp_path) == ("infiniband", 400.0)
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert read_network(tmp_path) == ("socket", 25.0)
    device(tmp_path, "rdmap0s6", "efa", "4: ACTIVE", "100 Gb/sec (4X EDR)")
    device(tmp_path, "rdmap0s7", "efa", "4: ACTIVE", "100 Gb/sec (4X EDR)")
    assert read_network(tmp_path) == ("efa", 200.0)


def test_cuda_visible_devices_is_respected():
    gpus = [("GPU-aa11", "A"), ("GPU-bb22", "B"), ("GPU-cc33", "C")]
    assert seen_by_cuda(gpus, "2,0") == [gpus[2], gpus[0]]
    assert seen_by_cuda(gpus, "") == seen_by_cuda(gpus, "-1") == seen_by_cuda(gpus, "7") == []
    assert seen_by_cuda(gpus, "1,9,0") == [gpus[1]], "CUDA stops at the first wrong one"
    assert seen_by_cuda(gpus, "GPU-bb") == [gpus[1]]
    assert seen_by_cuda(gpus, "MIG-42") == [("MIG-42", "A")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("p9.huge:2", "instance type 'p9.huge' is not known; use one of"),
        ("p5.48xlarge:none", "1 to 4096, e.g. p5.48xlarge:2"),
        ("p5.48xlarge:1:9", "GPUs per instance must be 1 to 8, e.g. p5.48xlarge:1:4"),
        ("p5.48xlarge:1:0", "GPUs per instance must be 1 to 8"),
        ("p5.48xlarge:1:", "GPUs per instance must be 1 to 8"),
        ("p5.48xlarge:1:4:2", "use TYPE:COUNT or TYPE:COUNT:GPUS"),
    ],
)
def test_clusters_that_cannot_be(text, words):
    with pytest.raises(ValueError, match=words):
        from_cluster(text)


def test_an_instance_of_the_catalogue():
    topology = from_cluster("p5.48xlarge:4")
    assert [len(ranks) for ranks in topology.ranks_by_domain] == [8] * 4
    assert topology.hosts[3].name == "p5-3" and topology.hosts[0].network_gbits == 3200
    assert topology.link(0, 8) == "efa"


def test_a_part_of_an_instance_keeps_the_nics():
    topology = from_cluster("p4d.24xlarge:2:4")
    assert [len(ranks) for ranks in topology.ranks_by_domain] == [4, 4]
    assert topology.hosts == from_cluster("p4d.24xlarge:2").hosts
    assert from_cluster("g5.48xlarge:1:2").count_links() == {"pcie": 1}


def test_gpu_facts_hold_nothing_unknown():
    with pytest.raises(ValueError, match="colour"):
        GpuFacts.model_validate({"uuid": "GPU-1", "name": "A", "bus_id": "0", "colour": "green"})
