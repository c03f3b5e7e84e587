"""`megabench transport`: what it says about the logs and topologies that people already have."""

import json

import pytest

from megabench import cli
from tests.hardware.log_lines import NO_PLUGIN, OFI, job_log
from tests.hardware.test_topo_files import AWS, DUMP, H100, PAIRS


@pytest.fixture
def transport(monkeypatch, capsys, tmp_path):
    """Runs the command on files with the given contents. Returns the exit status, standard output and error."""

    def run(*contents: str | bytes, options: tuple[object, ...] = ()) -> tuple[int, str, str]:
        paths = [tmp_path / f"file-{number}" for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.setattr("sys.argv", ["megabench", "transport", *map(str, [*paths, *options])])
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_efa_with_gpudirect(transport):
    status, out, _ = transport(*(job_log(host, prefix=f"pod-{host}: ") for host in (0, 1)))
    lines = out.splitlines()
    assert status == 0
    assert lines[0] == "Between hosts: EFA with GPUDirect RDMA (NET/Libfabric/GDRDMA)."
    assert lines[1] == "Inside hosts: NVLink (P2P/CUMEM/read). TP inside a host is fine."
    assert "plugin aws-ofi-nccl 1.16.2 · libfabric provider efa · 2 hosts: train-node-0-0, train-node-0-1" in lines[2]
    assert "tp4·dp2 on 8 ranks, 2 hosts" in out and "WARNING" not in out
    assert "| tp    | 4–7   | train-node-0-1                 | NVLink       | P2P/CUMEM/read       |" in out
    assert "| dp    | 0, 4  | train-node-0-0, train-node-0-1 | EFA          | NET/Libfabric/GDRDMA |" in out


def test_sockets_because_the_plugin_is_missing(transport):
    status, out, _ = transport(*(job_log(host, between="NET/Socket/0", start=NO_PLUGIN) for host in (0, 1)))
    first = out.splitlines()[0]
    assert status == 0
    assert first.startswith(
        "Between hosts: TCP sockets (NET/Socket). Training across hosts will be slow: the EFA plugin"
    )
    assert 'log: "NET/Plugin: Could not find: libnccl-net.so"' in first and "vpc.amazonaws.com/efa" in first


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (("NCCL_NET set by environment to Socket.",), "NCCL_NET=Socket selects sockets. Unset NCCL_NET."),
        (("NCCL_IB_DISABLE set by environment to 1.",), "NCCL_IB_DISABLE is set."),
        (("NET/OFI Selected Provider is tcp (found 1 nics)",), "libfabric uses the provider tcp. Set FI_PROVIDER=efa"),
    ],
)
def test_other_reasons_for_sockets(transport, start, reason):
    _, out, _ = transport(*(job_log(host, between="NET/Socket/0", start=start) for host in (0, 1)))
    assert reason in out.splitlines()[0]


def test_efa_without_gpudirect(transport):
    _, out, _ = transport(*(job_log(host, between="NET/AWS Libfabric/{nic}") for host in (0, 1)))
    assert out.startswith("Between hosts: EFA (NET/AWS Libfabric). GPUDirect RDMA: not used")


def test_shared_memory_inside_hosts(transport):
    _, out, _ = transport(job_log(0, num_hosts=1, inside="SHM/direct/direct", start=()))
    assert out.startswith("Between hosts: the job has one host.\nInside hosts: shared memory (SHM).")
    assert "WARNING: the TP group of ranks 0–3" in out and "shared memory" in out


def test_p2p_may_be_nvlink_or_pcie(transport):
    log = job_log(0, num_hosts=1, inside="P2P/IPC", start=())
    _, out, _ = transport(log)
    assert (
        "NVLink or PCIe, which the log does not tell (P2P/IPC)" in out and "Also give the output of nvidia-smi" in out
    )
    _, out, _ = transport(log, H100)
    assert "Inside hosts: NVLink (P2P/IPC). TP inside a host is fine." in out and "WARNING" not in out


def test_a_log_without_channels(transport):
    log = "".join(line for line in job_log(0).splitlines(keepends=True) if "Channel" not in line)
    status, out, _ = transport(log)
    assert status == 0 and "no channel lines" in out
    assert out.startswith("Between hosts: the logs contain no connections. NCCL selected the network Libfabric.")


def test_json(transport):
    status, out, _ = transport(
        *(job_log(host) for host in (0, 1)), H100, options=("--json", "--tp", 2, "--pp", 2, "--vp", 2)
    )
    found = json.loads(out)
    assert status == 0 and found["job"]["gpudirect_rdma"] is True and found["job"]["provider"] == "efa"
    (communicator,) = found["job"]["communicators"]
    assert {"sender": 3, "receiver": 4, "where": "between", "transports": ["NET/Libfabric/GDRDMA"]} in communicator[
        "connections"
    ]
    assert found["hosts"][0]["gpus"][1]["nearest_nics"] == ["mlx5_0"]
    groups = {(group["kind"], tuple(group["ranks"])): group for group in found["diagram"]["groups"]}
    assert groups["pp", (0, 4)]["transport"] == "NET/Libfabric/GDRDMA" and groups["pp", (0, 4)]["link"] == "efa"
    assert groups["tp", (2, 3)]["transport"] == "P2P/CUMEM/read"


def test_the_matrix_of_nvidia_smi(transport):
    status, out, _ = transport(H100)
    assert status == 0
    assert out.startswith("file-0: one NVLink domain of 4 GPUs (NV18). TP up to 4 inside the host is fine.\n")
    assert "GPUs 1, 3 have no NIC on their PCIe switch" in out and "tp4 on 4 ranks, 1 host" in out
    _, out, _ = transport(PAIRS)
    assert out.startswith("file-0: NVLink domains of GPUs 0, 1 and 2, 3 (NV4). TP up to 2 stays on NVLink.")
    assert "which tp=2 fits" in out


def test_topology_files(transport):
    status, out, _ = transport(DUMP)
    assert status == 0 and out.startswith("file-0: one NVLink domain of 2 GPUs (NV18).")
    status, out, _ = transport(AWS)
    assert status == 0 and "The file lists no NVLinks." in out and "WARNING: no diagram" in out
    assert "| GPU0 0000:10:1c.0 | 0000:10:1b.0 | same PCIe switch" in out


def test_a_pod_log_with_a_matrix_and_nccl_lines(transport):
    status, out, _ = transport(H100 + job_log(0, num_hosts=1, inside="P2P/IPC", start=()))
    assert status == 0 and "Inside hosts: NVLink (P2P/IPC)" in out and "one NVLink domain of 4 GPUs" in out


def test_absurd_rank_numbers(transport):
    start = "a:1:1 [0] NCCL INFO Channel 00 : 0[0] -> "
    status, out, _ = transport(f"{start}99999[1] via P2P/IPC\n{start}{10**30}[1] via P2P/IPC\n")
    assert status == 0 and "more than 4096 ranks" in out and "format is unknown: 1, for example" in out


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("step 1: loss 9.5\n", (), "unknown content. Use an NCCL log (NCCL_DEBUG=INFO), the output of nvidia-smi topo"),
        ("", (), "unknown content"),
        (b"\x7fELF\x00\x01\xff\xfe" * 100, (), "unknown content"),
        ("NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/IPC\n", (), "no line has the form HOST:PID:TID"),
        ("<system><cpu></system>", (), "the XML is malformed"),
        ("<system>" + " " * 2**22 + "</system>", (), "larger than 4 MiB"),
        (H100[:120], (), "the row of GPU"),
        ("".join(OFI), ("--tp", 3), "unknown content"),
        (job_log(0), ("--tp", 3), "tp=3 × cp=1 × pp=1 needs a multiple of 3"),
        (H100, ("--vp", 2), "vp=2 interleaves pipeline stages"),
    ],
)
def test_bad_input_is_one_sentence(transport, content, options, words):
    status, out, err = transport(content, options=options)
    assert status == 2 and out == "" and words in err and err.startswith("Error: ") and err.count("\n") == 1


def test_a_file_that_is_not_there(transport, tmp_path):
    status, _, err = transport(options=(tmp_path / "none.log",))
    assert status == 2 and err.count("\n") == 1 and "none.log" in err
    assert transport(options=(tmp_path,))[0] == 2
