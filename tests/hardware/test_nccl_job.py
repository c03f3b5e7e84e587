"""Jobs from NCCL logs: which hosts, which communicators, and which transports between their ranks."""

import sys
from pathlib import Path

import pytest

from megabench.hardware.nccl_job import merge, network_of, topology_of
from megabench.hardware.transport import read
from tests.hardware.log_lines import INITS, NO_PLUGIN, big_job_log, job_log, split_job_log

RECORDED = Path(__file__).parent / "recorded"


def test_two_pods_are_one_job():
    job = merge([read(job_log(host, prefix=f"pod-{host}: ")) for host in (0, 1)])
    (world,) = job.communicators
    assert job.hosts == ["train-node-0-0", "train-node-0-1"] and (world.num_ranks, world.num_nodes) == (8, 2)
    assert world.pairs_by_transport("between") == {"NET/Libfabric/GDRDMA": [(3, 4), (7, 0)]}
    assert world.pairs_by_transport("inside") == {"P2P/CUMEM/read": [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]}
    assert (job.intra_host_link, job.first("provider"), job.missing_ranks) == ("nvlink", "efa", [])
    topology = topology_of(job, p2p_is_nvlink=True)
    assert topology and topology.ranks_by_domain == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.link(0, 4) == "efa" and topology.hosts[0].network_gbits == 400


def test_pods_in_one_file_and_in_two_are_the_same_job():
    parts = [job_log(host) for host in (0, 1)]
    assert merge([read("".join(parts))]).communicators == merge(list(map(read, parts))).communicators


def test_the_format_of_nccl_2_10():
    logs = [job_log(host, old=True, inside="P2P/IPC", between="NET/Socket/0", start=NO_PLUGIN) for host in (0, 1)]
    (world,) = merge([read(text) for text in logs]).communicators
    assert world.pairs_by_transport("between") == {"NET/Socket": [(3, 4), (7, 0)]}
    assert len(world.pairs_by_transport("inside")["P2P/IPC"]) == 6


def test_a_log_of_the_first_of_two_hosts_tells_the_second():
    job = merge([read(job_log(0))])
    assert job.hosts == ["train-node-0-0", "host-2 (not in the logs)"] and job.missing_ranks == [4, 5, 6, 7]
    topology = topology_of(job, p2p_is_nvlink=True)
    assert topology and topology.ranks_by_domain == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_log_of_the_first_host_without_the_number_of_hosts_tells_no_topology():
    job = merge([read(job_log(0, old=True, inside="P2P/IPC"))])
    assert job.communicators[0].hosts.keys() == {0, 1, 2, 3} and topology_of(job, p2p_is_nvlink=True) is None
    assert job.transports("between") == ["NET/Libfabric/GDRDMA"]


def test_shared_memory_joins_no_nvlink_domain():
    texts = [
        job_log(host).replace(" 1[1] -> 2[2] via P2P/CUMEM/read", " 1[1] -> 2[2] via SHM/direct/direct")
        for host in (0, 1)
    ]
    topology = topology_of(merge([read(text) for text in texts]), p2p_is_nvlink=True)
    assert topology and topology.ranks_by_domain == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert topology.link(1, 2) == "shm"


def test_p2p_over_pcie_is_no_nvlink_domain():
    log = read(job_log(0, num_hosts=1, inside="P2P/IPC", start=()))
    assert merge([log]).intra_host_link is None
    log = read("h:1:1 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 2, bw 12.0/12.0, type PHB/PIX, sameChannels 1\n")
    assert merge([log]).intra_host_link == "pcie"
    topology = topology_of(merge([read(job_log(0, num_hosts=1))]), p2p_is_nvlink=False)
    assert topology and topology.link(0, 1) == "pcie"


def test_multi_node_nvlink_joins_hosts():
    job = merge([read(job_log(host, between="P2P/MNNVL").replace(" [send]", "")) for host in (0, 1)])
    topology = topology_of(job, p2p_is_nvlink=True)
    assert topology and topology.ranks_by_domain == [list(range(8))] and len(topology.hosts) == 2


def test_hosts_with_equal_names():
    job = merge([read((RECORDED / "h200x4-two-hosts-of-two.log").read_text())])
    assert job.hosts == ["vm#0", "vm#1"]
    assert job.transports("between") == ["NET/Socket"] and job.transports("inside") == ["P2P/CUMEM"]


def split_log(rank: int) -> str:
    """Two hosts of two GPUs whose world is split into pairs on a host (color 1, 2) and across (color 3, 4).

    The format is that of NCCL 2.28.
    """
    host, gpu = divmod(rank, 2)
    start = f"node-{host}:{10 + gpu}:{10 + gpu} [{gpu}] NCCL INFO "
    device = f"cudaDev {gpu} nvmlDev {gpu} busId {gpu + 6}0"
    across = f"[send] via NET/IB/{gpu}/GDRDMA"
    pair = f"nranks 2 {device} parent 0xa splitCount"
    lines = [
        f"ncclCommInitRankConfig comm 0xa rank {rank} nranks 4 {device} commId 0x77 - Init START",
        f"comm 0xa rank {rank} nRanks 4 nNodes 2 localRanks 2 localRank {gpu} MNNVL 0",
        f"ncclCommSplit comm 0xb rank {gpu} {pair} 1 color {host + 1} key 0- Init START",
        f"comm 0xb rank {gpu} nRanks 2 nNodes 1 localRanks 2 localRank {gpu} MNNVL 0",
        f"ncclCommSplit comm 0xc rank {host} {pair} 2 color {gpu + 3} key 0- Init START",
        f"comm 0xc rank {host} nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0",
        f"Channel 00/0 : {host}[{gpu}] -> {1 - host}[{gpu}] {across}",
    ]
    if gpu == 0:
        lines.append("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM")
    return "".join(f"{start}{line}\n" for line in lines)


def test_connections_of_split_communicators():
    job = merge([read("".join(map(split_log, range(4))))])
    assert [made.num_ranks for made in job.communicators] == [4, 2, 2, 2, 2]
    pairs = [made for made in job.communicators if made.num_ranks == 2]
    inside = [made for made in pairs if len(set(made.hosts.values())) == 1]
    across = [made for made in pairs if len(set(made.hosts.values())) == 2]
    assert [made.transports for made in inside] == [{(0, 1): {"P2P/CUMEM"}}] * 2
    assert [made.transports for made in across] == [{(0, 1): {"NET/IB/GDRDMA"}, (1, 0): {"NET/IB/GDRDMA"}}] * 2
    topology = topology_of(job, p2p_is_nvlink=True)
    assert topology and topology.ranks_by_domain == [[0, 1], [2, 3]] and topology.link(0, 2) == "infiniband"


@pytest.mark.parametrize("version", INITS)
@pytest.mark.parametrize("num_gpus", [4, 2])  # with two GPUs, TP and DP groups have equal sizes
def test_split_communicators_in_every_version(version, num_gpus):
    job = merge([read(split_job_log(version, num_gpus))])
    assert not job.strays and not job.num_ambiguous and not job.logs[0].unknown
    world, *others = job.communicators
    assert world.num_ranks == 2 * num_gpus
    assert len(world.pairs_by_transport("inside")["P2P/CUMEM"]) == 2 * num_gpus - 2
    assert len(world.pairs_by_transport("between")["NET/IB/GDRDMA"]) == 2
    inside = [made for made in others if not made.pairs_by_transport("between")]
    across = [made for made in others if not made.pairs_by_transport("inside")]
    assert [len(made.pairs_by_transport("inside")["P2P/CUMEM"]) for made in inside] == [num_gpus] * 2
    assert [len(made.pairs_by_transport("between")["NET/IB/GDRDMA"]) for made in across] == [2] * num_gpus
    assert len(others) == 2 + num_gpus


def test_communicators_of_some_ranks_have_equal_colors_in_torch():
    """In torch, a color names the set of ranks, and ranks outside the set take part without a line in the log."""
    device = "cudaDev 0 nvmlDev 0 busId 60"
    text = ""
    for rank, splits in enumerate([[5, 7, 5], [5, 7, 5], [6, 5, 6], [6, 5, 6]]):
        start = f"node-{rank}:1:1 [0] NCCL INFO "
        text += f"{start}ncclCommInitRank comm 0xa rank {rank} nranks 4 {device} commId 0x1 - Init START\n"
        for number, color in enumerate(splits):
            own = f"comm 0xb{number} rank {rank % 2} nranks 2 {device}"
            text += f"{start}ncclCommSplit {own} parent 0xa color {color} key 0 - Init START\n"
    job = merge([read(text)])
    assert job.num_ambiguous == 0 and len(job.communicators) == 7


def test_communicators_that_the_log_does_not_tell_apart():
    init = "comm 0xa rank 0 nranks 2 cudaDev 0 busId 60 - Init COMPLETE"
    job = merge([read("".join(f"node-{host}:1:1 [0] NCCL INFO {init}\n" for host in range(3)))])
    assert job.num_ambiguous == 1 and [made.hosts for made in job.communicators] == [{0: f"node-{n}"} for n in range(3)]


def test_a_creation_in_an_unknown_format_changes_no_other_communicator():
    whole = split_job_log("2.28")
    lines = [line for line in whole.splitlines() if "COMPLETE" not in line]
    strange = [line.replace("rank", "who") if "splitCount 1" in line else line for line in lines]
    expected = merge([read(whole)]).communicators
    job = merge([read("\n".join(strange) + "\n")])
    assert len(job.logs[0].unknown) == 8 and {connection.transport for connection in job.strays} == {"P2P/CUMEM"}
    assert job.communicators == [made for made in expected if made.num_ranks != 4]


def test_connections_before_any_creation_are_left_out():
    text = split_job_log("2.28")
    tail = [line for line in text.splitlines() if "node-0:1000" not in line or "Channel" in line]
    job = merge([read("\n".join(tail) + "\n")])
    assert len(job.strays) == 2 and job.hosts == ["node-0", "node-1"]


def test_merging_takes_a_time_linear_in_the_number_of_ranks():
    def calls(num_ranks: int) -> int:
        log, count = read("".join(big_job_log(num_ranks, num_channels=1))), 0

        def count_call(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(count_call)
        try:
            topology_of(merge([log]), p2p_is_nvlink=True)
        finally:
            sys.setprofile(None)
        return count

    assert calls(512) < 2.2 * calls(256)


def test_lines_without_a_communicator():
    (made,) = merge(
        [read("a:1:1 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[1c000] via direct shared memory\n")]
    ).communicators
    assert made.transports == {(0, 1): {"SHM"}} and made.hosts == {0: "a", 1: "a"}


@pytest.mark.parametrize(
    ("transports", "provider", "expected"),
    [
        (["NET/Socket", "NET/IB"], None, "socket"),
        (["NET/AWS Libfabric/GDRDMA"], None, "efa"),
        (["NET/Libfabric"], "efa", "efa"),
        (["NET/Libfabric"], "tcp;ofi_rxm", "socket"),
        (["NET/AWS Libfabric/GDRDMA"], "cxi", "infiniband"),
        (["NET/IB/GDRDMA"], None, "infiniband"),
        (["NET/Emulated"], None, "socket"),
        ([], None, "socket"),
    ],
)
def test_the_network_of_transports(transports, provider, expected):
    assert network_of(transports, provider) == expected
