"""`megabench transport`: what it says about the logs and topologies that people already have."""

import json

import pytest

from megabench import cli
from tests.hardware.log_lines import INITS, NO_PLUGIN, OFI, job_log, split_job_log
from tests.hardware.test_topo_files import AWS, DUMP, GB200, H100, PAIRS


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


def test_emulated_hosts_over_shared_memory(transport):
    _, out, _ = transport(*(job_log(host, between="NET/Emulated/0", start=()) for host in (0, 1)))
    assert "Between hosts: shared memory at the rate of emulate_network (NET/Emulated)." in out


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
    assert "GPUs 1, 3 have no NIC on the same PCIe switch" in out and "tp4 on 4 ranks, 1 host" in out
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


@pytest.mark.parametrize("version", INITS)
def test_the_table_is_equal_for_all_versions(transport, version):
    _, out, _ = transport(split_job_log(version))
    assert out == transport(split_job_log("2.28"))[1]
    rows = [line for line in out.splitlines() if line.startswith(("| 1 ×", "| 2 ×", "| 4 ×"))]
    assert [[cell.strip() for cell in row.split("|")[1:5]] for row in rows] == [
        ["1 × 8 ranks", "inside hosts", "P2P/CUMEM", "6"],
        ["1 × 8 ranks", "between hosts", "NET/IB/GDRDMA", "2"],
        ["2 × 4 ranks", "inside hosts", "P2P/CUMEM", "8"],
        ["4 × 2 ranks", "between hosts", "NET/IB/GDRDMA", "8"],
    ]


def test_gdrdma_over_the_pcie_path_of_gb200(transport):
    texts = [split_job_log("2.28"), split_job_log("2.28").replace("/GDRDMA", "/GDRDMA(PCI)")]
    plain, pci = (transport(text)[1] for text in texts)
    assert plain == pci and plain.startswith("Between hosts: InfiniBand or RoCE with GPUDirect RDMA (NET/IB/GDRDMA).")


def test_a_failed_start_tells_no_number_of_gpus(transport):
    text = "".join(
        f"node-{host}:{gpu}:1 [{gpu}] NCCL INFO {line}\n" for host in (0, 1) for gpu in range(4) for line in NO_PLUGIN
    )
    _, out, _ = transport(text)
    assert "Inside hosts: the logs contain no communicator, so the number of GPUs per host is unknown." in out


def test_lines_of_nccl_2_4(transport):
    lines = ["Ring 00 : 0[0] -> 1[1] via P2P/IPC", "Ring 00 : 1 -> 2 [send] via NET/IB/0"]
    init = "comm 0x1 rank {rank} nranks 4 cudaDev {gpu} nvmlDev {gpu} - Init COMPLETE"
    logs = []
    for rank in range(4):
        host, gpu = divmod(rank, 2)
        line = (
            lines[gpu] if host == 0 else lines[gpu].replace("1 -> 2", "3 -> 0").replace("0[0] -> 1[1]", "2[0] -> 3[1]")
        )
        start = f"node-{host}:{10 + gpu}:1 [{gpu}] NCCL INFO "
        logs.append(f"{start}{line}\n{start}{init.format(rank=rank, gpu=gpu)}\n")
    _, out, _ = transport("".join(logs))
    assert out.startswith("Between hosts: InfiniBand or RoCE (NET/IB). GPUDirect RDMA: not used")
    assert "1 × 4 ranks   | inside hosts  | P2P/IPC" in out and "unknown" not in out
    # The log of rank 0 alone: another host exists, and the other lines belong to unknown communicators.
    _, out, _ = transport(logs[0] + "".join(log.splitlines()[0] + "\n" for log in logs[1:]))
    assert out.startswith("Between hosts: the logs contain no connections.") and "2 hosts: node-0, node-1" in out
    assert "3 connections (NET/IB, P2P/IPC) are left out" in out


def test_pods_with_one_gpu_may_be_of_one_server(transport):
    logs = [job_log(host, num_hosts=4, num_gpus=1, between="NET/Socket/0", start=NO_PLUGIN) for host in range(4)]
    different = [log.replace("busId 101c0", f"busId {host + 1}01c0") for host, log in enumerate(logs)]
    line = next(line for line in transport(*different)[1].splitlines() if line.startswith("Inside hosts"))
    assert line.startswith("Inside hosts: one GPU per host. The 4 GPUs have 4 different bus ids, so these hosts may be")
    assert "start one pod with all its GPUs" in line and "over NVLink or PCIe, and" in line
    assert "one GPU per host.\n" in transport(*logs)[1]  # equal bus ids: the GPUs are in different servers


def test_a_process_that_nccl_counts_as_another_host(transport):
    logs = [job_log(host, inside="P2P/CUMEM") for host in (0, 1)]
    apart = [log.replace("nNodes 2 localRanks 4", "nNodes 3 localRanks 3") for log in logs]
    assert "WARNING: NCCL counts 3 hosts, but the logs name 2." in transport(*apart)[1]
    assert "NCCL counts" not in transport(*logs)[1]


def test_lines_that_ray_left_out(transport):
    lines = job_log(0, num_hosts=1, num_gpus=2).splitlines()
    text = "".join(
        f"\x1b[36m(Worker pid=1)\x1b[0m {line}\x1b[32m [repeated 3x across cluster]\x1b[0m\n" for line in lines
    )
    _, out, _ = transport(text)
    assert "Inside hosts: NVLink (P2P/CUMEM/read)." in out and "unknown" not in out
    assert f"Ray left {3 * (len(lines) - 1)} similar lines out of the logs. Set RAY_DEDUP_LOGS=0" in out


def test_the_log_of_one_rank_tells_no_number_of_hosts(transport):
    start = "a:1:1 [3] NCCL INFO "
    for text in (f"{start}Channel 01/0 : 3[af000] -> 0[18000] via P2P/IPC\n", f"{start}Using network Socket\n"):
        assert transport(text)[1].startswith("Between hosts: the logs contain no connections.")


def test_the_variable_that_disables_p2p_is_named(transport):
    log = job_log(0, num_hosts=1, inside="SHM/direct/direct", start=("NCCL_P2P_LEVEL set by environment to LOC",))
    assert "so TP will be slow. NCCL_P2P_LEVEL=LOC is set. Unset it." in transport(log)[1]


def test_a_multi_node_nvlink_domain(transport):
    _, out, _ = transport(GB200)
    assert out.startswith(
        "file-0: 2 hosts of 2 GPUs in one NVLink domain of 4 GPUs (NV18). TP up to 4 stays on NVLink."
    )
    assert "NVLink domain 0, 4 GPUs of 2 hosts" in out


def test_a_file_of_one_gpu_tells_nothing_about_nvlink(transport):
    text = DUMP[: DUMP.index('    <pci busid="0000:3b')] + "  </cpu>\n</system>\n"
    _, out, _ = transport(text)
    assert out.startswith("file-0: 1 GPU (NV18). The file lists no other GPU, so it tells nothing about links between")
    assert "TP" not in out and "domain" not in out
    log = job_log(0, num_hosts=1, inside="P2P/IPC", start=())
    assert "NVLink or PCIe, which the log does not tell" in transport(log, text)[1]


def test_the_states_of_nvlinks(transport):
    link = "\t Link {}: 25.781 GB/s\n"
    gpus = [f"GPU {n}: Tesla V100 (UUID: GPU-{n})\n" + "".join(map(link.format, range(6))) for n in range(4)]
    status, out, _ = transport("".join(gpus))
    assert status == 0 and out.startswith("file-0: 4 GPUs, 6 active NVLinks each. The file does not tell which GPUs")
    broken = "".join(gpus).replace(
        "GPU 3: Tesla V100 (UUID: GPU-3)\n\t Link 0: 25.781 GB/s", gpus[3][:32] + "\t Link 0: <inactive>"
    )
    _, out, _ = transport(broken)
    assert "active NVLinks: 6 on GPUs 0–2, 5 on GPU 3." in out and "NVLinks of GPU 3 are inactive." in out
    none = "GPU 0: A100 (UUID: GPU-1)\nNVML: Unable to retrieve NVLink information as all links are inActive\n"
    log = job_log(0, num_hosts=1, num_gpus=2, inside="P2P/IPC", start=())
    _, out, _ = transport(log, none + none.replace("GPU 0", "GPU 1"))
    assert "Inside hosts: PCIe (P2P/IPC)." in out and "2 GPUs without NVLink." in out


P2P_MATRIX = (
    " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n\nLegend:\n\n  X    = Self\n  CNS  = Chipset not supported\n"
)


@pytest.mark.parametrize(
    ("content", "source"),
    [
        (P2P_MATRIX, "nvidia-smi topo -p2p"),
        (P2P_MATRIX[: P2P_MATRIX.index("Legend")], "nvidia-smi topo -p2p"),
        (
            "=== Weight between two GPUs ===\n       GPU0      GPU1\nGPU0   0         15\nGPU1   15        0\n",
            "rocm-smi --showtopo",
        ),
        (
            "LINK TYPE TABLE:\n             0000:c1:00.0 0000:c6:00.0\n0000:c1:00.0 SELF         XGMI\n",
            "amd-smi topology",
        ),
        ("GPU 0: NVIDIA X (UUID: GPU-1)\n\t Link 0: Remote Device 00000000:05:00.0: Link 3\n", "nvidia-smi nvlink -R"),
        ("GPU 0: NVIDIA X (UUID: GPU-1)\n", "nvidia-smi -L"),
        ("Machine (512GB total)\n  Package L#0\n", "lstopo (hwloc)"),
        ("# nThread 1 nGpus 8 minBytes 8 maxBytes 1024\n", "nccl-tests without NCCL_DEBUG=INFO"),
    ],
)
def test_foreign_outputs_are_named(transport, content, source):
    status, _, err = transport(content)
    assert status == 2 and source in err and "which is not read. Use an NCCL log" in err and err.count("\n") == 1


def test_a_foreign_part_of_a_file_is_left_out(transport):
    status, out, _ = transport(H100 + P2P_MATRIX)
    assert status == 0 and out.startswith("file-0: one NVLink domain of 4 GPUs (NV18).")
    assert "file-0: the output of nvidia-smi topo -p2p is left out" in out


def test_a_file_of_rccl(transport):
    text = DUMP.replace("<nvlink", "<xgmi")
    assert "2 GPUs of AMD. The links between them (XGMI) are not read." in transport(text)[1]


def test_absurd_rank_numbers(transport):
    start = "a:1:1 [0] NCCL INFO Channel 00 : 0[0] -> "
    status, out, _ = transport(f"{start}99999[1] via P2P/IPC\n{start}{10**30}[1] via P2P/IPC\n")
    assert status == 0 and "more than 4096 ranks" in out and "format is unknown: 1, for example" in out


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("step 1: loss 9.5\n", (), "unknown content. Use an NCCL log (NCCL_DEBUG=INFO), the output of nvidia-smi topo"),
        ("", (), "unknown content"),
        ('{"traceEvents": []}', (), "a JSON file, which is not read. Use an NCCL log"),
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
