"""Measured collectives between hosts determine the cost of the network, and their share of the expected bandwidth."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megabench import api, cli
from megabench.cost.fabric import Collective, Fabric, inner_link
from megabench.cost.fabric_files import collectives_of, read_fabric
from megabench.cost.profile import Measurement, Profile, profile_for
from megabench.errors import UserError
from tests.planner.jobs import cluster
from tests.planner.nccl_output import output

TOPOLOGY = cluster("p5.48xlarge:8")
HOST, INSIDE = TOPOLOGY.hosts[0], inner_link(TOPOLOGY)
H100 = profile_for(HOST.device)
MEGABYTES = (1e6, 1.6e7, 2.56e8)


def with_network(**constants: float) -> Profile:
    links = H100.links | {"efa": H100.links["efa"].model_copy(update=constants)}
    return H100.model_copy(update={"links": links})


def measured(profile: Profile, kinds=("all_gather",), sizes=MEGABYTES, shapes=((8, 8, 1), (8, 1, 8), (2, 1, 8))):
    """Collectives that take exactly as long as the profile predicts."""
    found = []
    for kind in kinds:
        for num_hosts, ranks, groups in shapes:
            found += [Collective(kind, num_hosts, ranks, size, 1.0, groups) for size in sizes]
    return Fabric("nccl.log", tuple(replace(one, seconds=one.predicted(profile, HOST, INSIDE)) for one in found))


def test_the_fit_recovers_the_constants():
    slow = with_network(efficiency=0.5, hop_seconds=7e-5, base_seconds=3e-4, tree_share=0.3)
    fabric = measured(slow, ("all_gather", "all_reduce", "all_to_all"))
    found = fabric.profile_on(H100, TOPOLOGY).links["efa"]
    assert found.efficiency == pytest.approx(0.5, rel=0.05)
    assert found.hop_seconds == pytest.approx(7e-5, rel=0.05)
    assert found.tree_share == pytest.approx(0.3, rel=0.05)
    assert found.base_seconds == pytest.approx(3e-4, rel=0.2)


def test_one_size_determines_the_time_per_hop_only():
    slow = with_network(hop_seconds=7e-5)
    found = measured(slow, sizes=(2.56e8,), shapes=((8, 8, 1),)).profile_on(H100, TOPOLOGY)
    assert found.links["efa"].hop_seconds == pytest.approx(7e-5, rel=0.05)
    assert found.links["efa"].model_copy(update={"hop_seconds": H100.links["efa"].hop_seconds}) == H100.links["efa"]
    assert found.origin["efa.hop_seconds"] == "measured between hosts (nccl.log)"
    assert {name: cost for name, cost in found.links.items() if name != "efa"} == {
        name: cost for name, cost in H100.links.items() if name != "efa"
    }


def test_bandwidths_are_those_of_the_largest_collectives():
    fabric = measured(with_network(efficiency=0.25), ("all_reduce", "all_gather"))
    _, gather = fabric.bandwidths(H100, TOPOLOGY)
    assert gather.collective.num_bytes == 2.56e8 and gather.collective.ranks_per_host == 8
    assert 0.25 < gather.share < 0.75
    assert gather.collective.label == "all-gather over 8 hosts"


def test_collectives_are_read_from_a_profile(tmp_path: Path):
    fabric = measured(H100, ("all_gather", "send"))
    measurements = [
        Measurement(
            kind=one.kind.replace("_", "-"),
            sizes={
                "bytes": one.num_bytes,
                "hosts": one.num_hosts,
                "ranks_per_host": one.ranks_per_host,
                "groups_per_host": one.groups_per_host,
            },
            seconds=one.seconds,
        )
        for one in fabric.collectives
    ]
    inside = [Measurement(kind="all-gather", sizes={"bytes": 1e6, "ranks": 8}, seconds=1e-3)]
    assert collectives_of(inside + measurements) == fabric.collectives
    path = tmp_path / "fabric.json"
    for taken, expected in ((inside + measurements, fabric.collectives), (inside, None)):
        path.write_text(json.dumps(H100.model_copy(update={"measurements": taken}).model_dump()))
        if expected:
            assert read_fabric(path) == Fabric(str(path), expected)
        else:
            with pytest.raises(UserError, match="profile without measurements between hosts"):
                read_fabric(path)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("p5.48xlarge:1", "the cluster has one host. Remove --fabric"),
        ("gb200-nvl72", "does not work with hosts that share an NVLink domain"),
        ("p5.48xlarge:2:4", "was measured with 8 ranks per host, but the hosts of the cluster have 4"),
        ("u-p6e-gb200x72:2", "does not work with hosts that share an NVLink domain"),
    ],
)
def test_a_topology_that_the_fabric_does_not_describe_is_refused(where, said):
    with pytest.raises(UserError, match=f"--fabric nccl.log .*{said}"):
        measured(H100).check(cluster(where))


@pytest.fixture
def plan(monkeypatch, capsys):
    """Runs `megabench plan` for eight hosts in this process. Returns its exit status, its output and its errors."""

    def run(*arguments: object, where: tuple[str, ...] = ("p5.48xlarge:8",)) -> tuple[int, str, str]:
        options = [word for one in where for word in ("--cluster", one)]
        monkeypatch.setattr("sys.argv", ["megabench", "plan", *options, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def written(folder: Path, fabric: Fabric) -> Path:
    path = folder / "nccl.log"
    path.write_text(output(fabric.collectives, "all_gather_perf", redop="none"))
    return path


def test_a_plan_says_what_a_slow_network_reaches(tmp_path: Path, plan):
    path = written(tmp_path, measured(with_network(hop_seconds=1e-3), shapes=((8, 8, 1),)))
    status, out, _ = plan("--fabric", path, "--global-batch", 64)
    assert status == 0
    note = next(line for line in out.splitlines() if line.startswith("Network as measured"))
    assert note.startswith(f"Network as measured in {path}: all-gather over 8 hosts reaches 3.")
    assert " GB/s, 5% of what EFA of p5.48xlarge should reach. It makes" in note
    found = json.loads(plan("--fabric", path, "--global-batch", 64, "--json")[1])
    assert found["fabric"]["file"] == str(path) and found["fabric"]["slowdown"] > 1
    assert note.endswith(f"a step of the recommended layout {found['fabric']['slowdown']:.2f} × as long.")
    (bandwidth,) = found["fabric"]["bandwidths"]
    assert (bandwidth["kind"], bandwidth["num_hosts"], bandwidth["ranks_per_host"]) == ("all-gather", 8, 8)
    assert bandwidth["share"] == pytest.approx(bandwidth["gb_per_s"] / bandwidth["expected_gb_per_s"])
    expected = json.loads(plan("--global-batch", 64, "--json")[1])
    assert "fabric" not in expected
    assert found["ranked"][0]["step_seconds"] > expected["ranked"][0]["step_seconds"]


def test_the_network_of_a_calibrated_profile_is_not_the_expected_one(tmp_path: Path, plan):
    """A profile that was measured on the slow hosts does not make their network look healthy."""
    slow = with_network(hop_seconds=1e-3)
    path = written(tmp_path, measured(slow, shapes=((8, 8, 1),)))
    profile = tmp_path / "profile.json"
    profile.write_text(slow.model_dump_json())
    assert "GB/s, 5% of what EFA of" in plan("--fabric", path, "--profile", profile)[1]


def test_fewer_gpus_per_host_are_refused():
    """They would use a part of the NICs only."""
    with pytest.raises(UserError, match=r"measured with 1 ranks per host, .* have 8. Measure with 8 ranks per host."):
        measured(H100, shapes=((8, 1, 1),)).check(TOPOLOGY)


def test_a_plan_says_that_a_network_is_as_fast_as_expected(tmp_path: Path, plan):
    path = written(tmp_path, measured(H100, shapes=((8, 8, 1),)))
    _, out, _ = plan("--fabric", path)
    note = next(line for line in out.splitlines() if line.startswith("Network as measured"))
    assert note.startswith(f"Network as measured in {path}: as fast as EFA of p5.48xlarge should be (all-gather over 8")
    assert note.endswith(" GB/s, 100%).")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (("p5.48xlarge:1",), "the cluster has one host"),
        (("p5.48xlarge:8", "p5.48xlarge:4"), "describes one network. Use it with one --cluster."),
    ],
)
def test_a_plan_that_cannot_use_the_fabric_is_refused(tmp_path: Path, plan, where, said):
    path = written(tmp_path, measured(H100, shapes=((8, 8, 1),)))
    status, out, error = plan("--fabric", path, where=where)
    assert (status, out, error.count("\n")) == (2, "", 1) and said in error


def test_a_very_slow_network_is_fitted():
    """Such as sockets in place of EFA: a hundredth of the bandwidth."""
    slow = with_network(efficiency=0.0025, hop_seconds=5e-5, tree_share=0.5)
    fabric = measured(slow, ("all_gather", "all_reduce"))
    found = fabric.profile_on(H100, TOPOLOGY)
    for one in fabric.collectives:
        assert one.predicted(found, HOST, INSIDE) == pytest.approx(one.seconds, rel=0.1)


def test_one_size_is_not_enough_for_a_plan(tmp_path: Path, plan):
    path = written(tmp_path, measured(H100, sizes=(2.56e8,), shapes=((8, 8, 1),)))
    status, _, error = plan("--fabric", path)
    assert status == 2 and "needs collectives of at least two sizes" in error


def test_a_file_of_a_faster_network_is_refused(tmp_path: Path, plan):
    fast = H100.model_copy(
        update={"links": H100.links | {"efa": H100.links["efa"].model_copy(update={"efficiency": 1})}}
    )
    path = written(tmp_path, measured(fast, shapes=((2, 8, 1),)))
    status, _, error = plan("--fabric", path, where=("g6e.48xlarge:2",))
    assert status == 2 and "is of another network: all-gather over 2 hosts reaches" in error
    with pytest.raises(UserError, match="is of another network"):
        api.plan(cluster="g6e.48xlarge:2", fabric=path)


def test_unequal_hosts_are_refused():
    fast, slow = TOPOLOGY.hosts[:2]
    hosts = (fast, replace(slow, network_gbits=400.0), *TOPOLOGY.hosts[2:])
    with pytest.raises(UserError, match="works only with equal hosts"):
        measured(H100).check(replace(TOPOLOGY, hosts=hosts))


@pytest.mark.parametrize("sizes", [{"bytes": 0.0}, {"hosts": float("nan")}, {"bytes": float("inf")}])
def test_impossible_measurements_are_refused(tmp_path: Path, sizes):
    """JSON has no NaN or infinity, but Python reads and writes them."""
    usual = {"bytes": 1e6, "hosts": 2.0, "ranks_per_host": 8.0, "groups_per_host": 1.0} | sizes
    profile = json.loads(H100.model_dump_json()) | {
        "measurements": [{"kind": "all-gather", "sizes": usual, "seconds": 1}]
    }
    path = tmp_path / "here.json"
    path.write_text(json.dumps(profile))
    with pytest.raises(UserError, match="is not a valid profile"):
        read_fabric(path)


@pytest.mark.parametrize("schema", [None, 0, 2])
def test_a_profile_of_another_schema_is_refused(tmp_path: Path, schema: int | None):
    profile = json.loads(H100.model_dump_json()) | {"schema_version": schema}
    path = tmp_path / "here.json"
    path.write_text(json.dumps(profile))
    with pytest.raises(UserError, match=rf"profile schema {schema}, and this megabench reads schema 1; create"):
        read_fabric(path)
