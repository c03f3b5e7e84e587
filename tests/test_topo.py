"""`megabench topo`, as picture and as JSON."""

import json
from pathlib import Path

import pytest

from megabench import cli
from megabench.cost.fabric import Collective
from tests.planner.nccl_output import output

CLUSTERS = Path(__file__).parents[1] / "configs/clusters"


def topo(monkeypatch, *arguments: object) -> int:
    """Runs the command in this process; its exit status."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("sys.argv", ["megabench", "topo", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def as_json(monkeypatch, capsys, *arguments: object) -> dict:
    assert topo(monkeypatch, "--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_tp_in_hosts_and_pp_across(monkeypatch, capsys):
    found = as_json(monkeypatch, capsys, "--cluster", "p4d.24xlarge:2", "--tp", 8, "--pp", 2)
    groups = {(group["kind"], tuple(group["ranks"]), group["link"]) for group in found["groups"]}
    assert {group for group in groups if group[0] == "tp"} == {
        ("tp", tuple(range(8)), "nvlink"),
        ("tp", tuple(range(8, 16)), "nvlink"),
    }
    assert {group for group in groups if group[0] == "pp"} == {("pp", (n, n + 8), "efa") for n in range(8)}
    assert [host["ranks"] for host in found["hosts"]] == [list(range(8)), list(range(8, 16))]
    assert [domain["hosts"] for domain in found["domains"]] == [["p4d-0"], ["p4d-1"]]
    assert found["links"] == [
        {"kind": "nvlink", "num_pairs": 56, "gb_per_s": 300.0},
        {"kind": "efa", "num_pairs": 64, "gb_per_s": 50.0},
    ]
    assert found["warnings"] == []


def test_a_measured_network(monkeypatch, capsys, tmp_path: Path):
    """An all-gather of 256 MB between two hosts, far below the bandwidth of EFA."""
    path, asked = tmp_path / "nccl.log", ("--cluster", "p5.48xlarge:2", "--tp", 8)
    slow = Collective("all_gather", 2, 8, 2.56e8, 2.56e8 / 40e9)
    path.write_text(output([slow], "all_gather_perf", redop="none"))
    (found,) = as_json(monkeypatch, capsys, *asked, "--fabric", path)["fabric"]["bandwidths"]
    assert found["kind"] == "all-gather" and found["gb_per_s"] == pytest.approx(slow.bus_gb_per_s, rel=1e-3)
    assert found["share"] == pytest.approx(found["gb_per_s"] / found["expected_gb_per_s"]) and found["share"] < 0.75
    assert topo(monkeypatch, *asked, "--fabric", path) == 0
    shown = capsys.readouterr().out.splitlines()
    (row,) = [line for line in shown if line.startswith("| all-gather over 2 hosts | 256 | 38 GB/s")]
    assert row.endswith(f"{found['share']:.0%}   |")
    assert shown[-1].startswith(f"WARNING: Network as measured in {path}: all-gather over 2 hosts reaches 38 GB/s, ")
    assert shown[-1].endswith("% of what EFA of p5.48xlarge should reach.")
    assert "fabric" not in as_json(monkeypatch, capsys, *asked)


@pytest.mark.parametrize(
    ("where", "said"),
    [("p5.48xlarge:1", "the cluster has one host"), ("p5.48xlarge:2:4", "hosts of the cluster have 4.")],
)
def test_a_measured_network_of_other_hosts_is_refused(monkeypatch, capsys, tmp_path: Path, where, said):
    path = tmp_path / "nccl.log"
    path.write_text(output([Collective("all_gather", 2, 8, 2.56e8, 0.01)], "all_gather_perf", redop="none"))
    assert topo(monkeypatch, "--cluster", where, "--fabric", path) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_tp_over_hosts_is_a_warning_and_strictly_an_error(monkeypatch, capsys):
    asked = ("--cluster", "p4d.24xlarge:2", "--tp", 16)
    (warning,) = as_json(monkeypatch, capsys, *asked)["warnings"]
    assert "spans hosts p4d-0, p4d-1" in warning and "tp=8 fits" in warning
    assert topo(monkeypatch, *asked) == 0 and "WARNING: the TP group" in capsys.readouterr().out
    assert topo(monkeypatch, *asked, "--strict-placement") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("Error: strict_placement: ") and said.err.count("\n") == 1


def test_without_nvlink_tp_rides_on_pcie(monkeypatch, capsys):
    (warning,) = as_json(monkeypatch, capsys, "--cluster", "g6e.48xlarge:1", "--tp", 2)["warnings"]
    assert "will ride on PCIe" in warning


def test_the_picture(monkeypatch, capsys):
    assert topo(monkeypatch, "--cluster", CLUSTERS / "h200-uneven.yaml", "--tp", 4, "--pp", 5) == 0
    picture = capsys.readouterr().out
    assert "node-2 · 4 × NVIDIA H200 · InfiniBand 3200 Gbit/s" in picture
    assert "tp A" in picture and "tp E" in picture and "tp F" not in picture
    assert "▼ stage 1 → stage 2 on node-1 over InfiniBand: 4 → 8" in picture


def test_this_machine_split_in_two(monkeypatch, capsys):
    monkeypatch.setattr("megabench.topo.visible_gpus", lambda: [])
    found = as_json(monkeypatch, capsys, "--tp", 2, "--pp", 2, "--emulate-hosts", 2)
    assert found["placement"]["emulated"] and [host["ranks"] for host in found["hosts"]] == [[0, 1], [2, 3]]
    assert {(group["kind"], group["link"]) for group in found["groups"]} == {("tp", "shm"), ("pp", "socket")}


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_cluster_file_is_a_cluster(monkeypatch, capsys, path):
    assert as_json(monkeypatch, capsys, "--cluster", path)["hosts"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("hosts: []", "hosts=[] is not valid: list should have at least 1 item"),
        ("hosts: [{gpus: 8}]", "hosts[0]: unknown setting 'gpus'; did you mean gpu or num_gpus?"),
        ("hosts: [{instance: p4}]", "instance type 'p4' is not known; did you mean p4d.24xlarge or p4de.24xlarge?"),
        ("- 8", "must contain a mapping of settings"),
    ],
)
def test_a_cluster_file_that_is_wrong(monkeypatch, capsys, tmp_path, content, sentence):
    path = tmp_path / "cluster.yaml"
    path.write_text(content)
    assert topo(monkeypatch, "--cluster", path) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tp", 3], "tp=3 × cp=1 × pp=1 needs a multiple of 3 processes, but the world size is 16"),
        (["--tp", 16, "--model", "llama3-8b"], "tp=16 does not divide num_kv_heads=8 of llama3-8b"),
        (["--placement", "random"], "placement=random is not known; use one of topology, launcher, spread-tp"),
        (["--vp", 2], "vp=2 interleaves pipeline stages and needs pp > 1, but pp=1; use vp=1 or pp=2"),
        (["--nproc", 4], "--nproc 4 and --cluster p4d.24xlarge:2 are mutually exclusive. Omit one of them."),
        (["--emulate-hosts", 2], "emulate_hosts=2 splits one machine, but the ranks are on 2 hosts"),
    ],
)
def test_what_cannot_be_is_one_sentence(monkeypatch, capsys, arguments, sentence):
    assert topo(monkeypatch, "--cluster", "p4d.24xlarge:2", *arguments) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1 and said.out == ""


def test_a_shape_is_checked_only_for_a_model_that_is_named(monkeypatch, capsys):
    assert as_json(monkeypatch, capsys, "--cluster", "p4d.24xlarge:2", "--tp", 16)["groups"]


def test_a_domain_over_hosts_is_drawn(monkeypatch, capsys):
    assert topo(monkeypatch, "--cluster", "p6e-gb200.36xlarge:18", "--tp", 8, "--pp", 3) == 0
    picture = capsys.readouterr().out
    assert picture.count("NVLink domain 0, 900 GB/s a GPU, 72 GPUs of 18 hosts") == 18
    assert "▼ stage 0 → stage 1 on p6e-gb200-6 over NVLink: 0 → 24" in picture and "WARNING" not in picture
    assert "| tp    | 0–7   " in picture and "over EFA" not in picture


def test_long_lists_of_hosts_are_short(monkeypatch, capsys):
    assert topo(monkeypatch, "--cluster", "u-p6e-gb200x72:1", "--tp", 72) == 0
    assert "| tp    | 0–71  | p6e-gb200-0, …, p6e-gb200-17 (18 hosts) | NVLink " in capsys.readouterr().out
    found = as_json(monkeypatch, capsys, "--cluster", "u-p6e-gb200x72:1", "--tp", 72)
    assert len(found["domains"][0]["hosts"]) == 18 and len(found["domains"]) == 1


def test_pods_that_share_a_server(monkeypatch, capsys):
    found = as_json(monkeypatch, capsys, "--cluster", "one-gpu-pods")
    assert [host["server"] for host in found["hosts"]] == ["server-0"] * 4
    assert topo(monkeypatch, "--cluster", "one-gpu-pods") == 0
    shown = capsys.readouterr().out
    assert "4 hosts on 1 server" in shown and "sockets of server-0" in shown
    assert "server-0: pod-0, pod-1, pod-2, pod-3 share its memory, CPUs and NICs, and no NVLink connects them." in shown
