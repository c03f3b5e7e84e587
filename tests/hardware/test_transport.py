"""NCCL's log: real ones, lines of many versions, and what cannot be read."""

from pathlib import Path

import pytest

from megabench.hardware import transport
from megabench.hardware.transport import CommInit, Communicator, LogTail, read

RECORDED = Path(__file__).parent / "recorded"
PREFIX = "host:101:202 [0] NCCL INFO "


def test_two_emulated_hosts_of_two():
    log = read((RECORDED / "h200x4-two-hosts-of-two.log").read_text())
    assert (log.version, log.network, log.unknown) == ("2.28.9", "Socket", [])
    assert log.communicators == [Communicator(rank, 4, 2, 2) for rank in range(4)]
    inside = {(c.sender, c.receiver) for c in log.connections if c.transport == "P2P/CUMEM"}
    across = {(c.sender, c.receiver) for c in log.connections if c.transport == "NET/Socket"}
    assert inside == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert across == {(0, 2), (2, 0), (1, 2), (3, 0)}
    assert log.transports == ["NET/Socket", "P2P/CUMEM"]


def test_four_emulated_hosts_of_one():
    log = read((RECORDED / "h200x4-four-hosts-of-one.log").read_text())
    assert {made.num_nodes for made in log.communicators} == {4}
    assert log.transports == ["NET/Socket"] and not log.unknown


@pytest.mark.parametrize(
    ("line", "expected", "pxn"),
    [
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "P2P/CUMEM", False),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "P2P/CUMEM/read", False),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/CE", "P2P/CUMEM", False),
        ("Channel 03/0 : 0[1a000] -> 1[1b000] via P2P/IPC/read", "P2P/IPC/read", False),
        ("Channel 00 : 0[101c0] -> 1[101d0] via P2P/IPC", "P2P/IPC", False),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer", "P2P/direct pointer", False),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/MNNVL", "P2P/MNNVL", False),
        ("Channel 00/0 : 0[0] -> 5[5] via P2P/indirect/1[1]", "P2P/indirect", False),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "SHM", False),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct", "SHM", False),
        ("Channel 00/0 : 1[1] -> 2[2] [send] via NET/Socket/0", "NET/Socket", False),
        ("Channel 00/1 : 1[1] -> 2[2] [receive] via NET/Socket/0/Shared", "NET/Socket", False),
        ("Channel 00/0 : 7[7] -> 8[0] [receive] via NET/Libfabric/0/GDRDMA", "NET/Libfabric/GDRDMA", False),
        (
            "Channel 00/0 : 7[a01d0] -> 8[101c0] [receive] via NET/AWS Libfabric/2/GDRDMA",
            "NET/AWS Libfabric/GDRDMA",
            False,
        ),
        ("Channel 00/0 : 7[7] -> 8[0] [send] via NET/AWS Libfabric/0", "NET/AWS Libfabric", False),
        ("Channel 04/0 : 1[1] -> 9[1] [send] via NET/IB/2(3)/GDRDMA", "NET/IB/GDRDMA", True),
        ("Channel 00 : 0[1b000] -> 1[1c000] via direct shared memory", "SHM", False),
        ("Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/0/GDRDMA(PCI)", "NET/IB/GDRDMA", False),
        ("Channel 00/0 : 3[1] -> 0[0] [send] via NET/IB/0(2)/GDRDMA(PCI)/Shared", "NET/IB/GDRDMA", True),
        ("Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IBext_v8/0/GDRDMA", "NET/IBext_v8/GDRDMA", False),
        ("Channel 00/0 : 0[0] -> 4[0] via P2P/MNNVL/read/CE", "P2P/MNNVL/read", False),
        ("Ring 00 : 15[41000] -> 0[1b000] [receive] via NET/IB/0", "NET/IB", False),
        ("Ring 00 : 1 -> 2 [send] via NET/AWS Libfabric/0", "NET/AWS Libfabric", False),
        (
            "Channel 00/0 : 4[d6000] -> 0[d6000] [receive] via NET/AWS Libfabric/2/GDRDMA comm 0x9bbf3b0 nRanks 8",
            "NET/AWS Libfabric/GDRDMA",
            False,
        ),
    ],
)
def test_lines_of_many_versions(line, expected, pxn):
    (connection,) = read(PREFIX + line + "\n").connections
    assert (connection.transport, connection.pxn) == (expected, pxn)


@pytest.mark.parametrize(
    "prefix",
    [
        "pod-1: ",
        "[rank3]:",
        "0: ",
        "[1,0]<stdout>:",
        "(MeshHostWorker pid=1706083) ",
        "[2026-04-28 14:14:47] ",
        "2026-04-28T14:14:47.123456789Z stderr F ",
        "[pod/train-worker-0/pytorch] ",
    ],
)
def test_lines_with_the_prefix_of_a_launcher(prefix):
    log = read(f"{prefix}gpu-node.example-1:21:26 [0] NCCL INFO Channel 00/0 : 0[35000] -> 1[f5000] via P2P/IPC/read\n")
    (connection,) = log.connections
    assert connection.process == ("gpu-node.example-1", 21) and connection.transport == "P2P/IPC/read"
    assert list(log.hosts) == ["gpu-node.example-1"] and log.intra_host_paths == {"NVL"} and not log.unknown


@pytest.mark.parametrize(
    ("line", "comm_id", "split"),
    [
        ("comm 0x7f5e rank 1 nranks 2 cudaDev 1 busId 1b000 - Init COMPLETE", None, None),  # NCCL 2.10
        ("comm 0x7f5e rank 1 nranks 2 cudaDev 1 nvmlDev 3 busId 1b000 commId 0x9 - Init START", "0x9", None),
        (
            "ncclCommSplit comm 0x7f5e rank 1 nranks 2 cudaDev 1 nvmlDev 3 busId 1b000 parent 0xa splitCount 4 "
            "color -7 key 0- Init START",
            None,
            ("0xa", 4, -7),
        ),
        (
            "[Rank 1] ncclCommGrow comm 0x7f5e rank 1 nranks 2 cudaDev 1 nvmlDev 3 busId 1b000 commId 0x9 - Init START",
            "0x9",
            None,
        ),
        (
            "ncclCommSplit comm 0x7f5e rank 1 nranks 2 cudaDev 1 busId 1b000 parent 0xa color -7 key 0- Init START",
            None,
            ("0xa", None, -7),
        ),
        (
            "comm 0x7f5e rank 1 nranks 2 cudaDev 1 busId 1b000 used 67129296 bytes - Init COMPLETE",  # RCCL
            None,
            None,
        ),
    ],
)
def test_the_creation_of_communicators(line, comm_id, split):
    (init,) = read(PREFIX + line + "\n").events
    assert isinstance(init, CommInit)
    assert (init.rank, init.num_ranks, init.comm_id, init.split) == (1, 2, comm_id, split)
    assert init.devices >= {"1", "1b000"}


def test_the_end_of_a_creation_is_not_another_one():
    lines = [
        f"comm 0x7f5e rank 1 nranks 2 cudaDev 1 nvmlDev 1 busId 1b000 commId 0x9 - Init {state}\n"
        for state in ("START", "COMPLETE")
    ]
    assert len(read("".join(PREFIX + line for line in lines)).events) == 1


def test_plugins_providers_and_the_environment():
    log = read(
        "".join(
            PREFIX + line + "\n"
            for line in (
                "NCCL_IB_DISABLE set by environment to 1.",
                "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
                "NET/OFI Using aws-ofi-nccl 1.5.0aws",
                "NET/OFI Selected Provider is efa (found 4 nics)",
                "Using network AWS Libfabric",
            )
        )
        + "host:101:202 [0] nccl_net_ofi_init:1444 NCCL WARN NET/OFI No eligible providers were found\n"
    )
    assert (log.plugin, log.provider, log.network) == ("aws-ofi-nccl 1.5.0aws", "efa", "AWS Libfabric")
    assert log.environment == {"NCCL_IB_DISABLE": "1"} and len(log.complaints) == 2


def test_lines_that_are_no_connections():
    text = "".join(
        PREFIX + line + "\n" for line in ("Channel 00/02 : 0 1 2 3", "Connected all rings", "Ring 00 : 3 -> 0 -> 1")
    )
    log = read(text + "a line of another program\n")
    assert not log.connections and not log.unknown


def test_what_is_not_known_is_kept():
    line = PREFIX + "Channel 00/0 : 0[0] -> 1[1] via WORMHOLE/9"
    log = read(f"{line}\n{PREFIX}Channel 00/0 between 0 -> 1 by some new form via NET/IB/0\n")
    assert not log.connections and log.unknown[0] == line and len(log.unknown) == 2


@pytest.mark.parametrize(
    "line",
    [
        "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEMnode-1:5:6 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[2] via P2P/CUMEM",
        "comm 0x1 rank 0 nRanks 8 nNodes 2 localRanks many",
        "comm 0x1 rank x nranks 8 cudaDev 0 busId 1b000 commId 0x9 - Init START",
        "ncclCommSplit comm 0x1 rank 0 nranks 8 cudaDev 0 busId 1b000 parent 0x2 color red key 0 - Init START",
        "CollNet 00/0 : 0 [send] via WORMHOLE/0",
        "Channel",
        "Channel 00/0 : 6[",
    ],
)
def test_lines_in_an_unknown_format_are_counted(line):
    log = read(PREFIX + line + "\n")
    assert log.unknown == [PREFIX + line] and not log.connections and not log.communicators


def test_reductions_in_switches():
    log = read(PREFIX + "CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA(PCI)\n" + PREFIX + "Connected NVLS tree\n")
    assert log.transports == ["COLLNET/SHARP/GDRDMA", "NVLS"] and not log.unknown


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("│ {} │", "pod-1"),  # k9s
        ("{}", "[pod-1]"),  # a name that was replaced before publication
        ("{}", "<pod-1>"),
        ("{} [repeated 7x across cluster] (Ray deduplicates logs by default. See …)", "pod-1"),
    ],
)
def test_lines_with_other_text_around(line, host):
    log = read(line.format(f"{host}:72:91 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/IPC") + "\n")
    assert [connection.transport for connection in log.connections] == ["P2P/IPC"] and list(log.hosts) == [host]
    assert log.num_repeated == 7 * ("repeated" in line) and not log.unknown


def test_a_warning_with_the_name_of_a_function():
    line = "host:101:202 [0] transport/net_ib.cc:12 (ncclIbInit) NCCL WARN NET/IB : no device\n"
    assert list(read(line).complaints) == ["NET/IB : no device"]


def test_an_empty_log_and_one_that_is_not_there(tmp_path):
    assert read("").transports == []
    assert LogTail(None).read_on().transports == LogTail(tmp_path / "none").read_on().transports == []


def test_a_line_that_is_cut_is_not_guessed_at():
    whole = (RECORDED / "h200x4-two-hosts-of-two.log").read_text()
    cut = whole[: whole.index("via P2P/CUMEM") + len("via P2P/CUM")]
    log = read(cut)
    assert not log.connections and log.unknown == [cut.splitlines()[-1]]
    for end in range(0, len(whole), 97):
        assert set(read(whole[:end]).transports) <= {"NET/Socket", "P2P/CUMEM"}


def test_a_log_is_read_on_from_where_it_was_left(tmp_path):
    path = tmp_path / "nccl.log"
    tail = LogTail(path)
    path.write_text(PREFIX + "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n")
    assert tail.read_on().transports == ["P2P/CUMEM"]
    with path.open("a") as file:
        file.write(PREFIX + "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0\n")
    assert tail.read_on().transports == ["NET/Socket"]
    assert tail.read_on().transports == []


def test_nvls_is_named():
    assert read(PREFIX + "Connected NVLS tree\n").transports == ["NVLS"]


@pytest.mark.parametrize(
    ("kind", "link", "transports", "words"),
    [
        ("tp", "nvlink", ["NET/Socket"], "between ranks of one NVLink domain, where nvlink was expected"),
        ("dp", "nvlink", ["SHM"], "NCCL uses SHM where nvlink was expected"),
        ("dp", "efa", ["NET/Socket", "P2P/CUMEM"], "EFA was expected, but NCCL uses NET/Socket"),
        ("pp", "infiniband", ["NET/Socket"], "InfiniBand was expected"),
        ("tp", "socket", ["NET/Socket"], "communicates over NET/Socket, a slow link that every layer waits for"),
        ("tp", "nvlink", ["P2P/CUMEM", "NVLS"], None),
        ("tp", "pcie", ["SHM"], None),
        ("dp", "efa", ["NET/Libfabric/GDRDMA", "P2P/CUMEM"], None),
        ("pp", "socket", ["NET/Socket"], None),
        ("tp", "nvlink", [], None),
    ],
)
def test_transports_against_the_topology(kind, link, transports, words):
    said = transport.disagreement(kind, link, transports)
    assert said is None if words is None else words in (said or "")
