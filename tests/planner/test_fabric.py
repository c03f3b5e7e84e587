"""Measured collectives between hosts determine the cost of the network, and their share of the expected bandwidth."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megabench import UserError
from megabench.cost.fabric import Collective, Fabric, inner_link
from megabench.cost.fabric_files import collectives_of, read_fabric
from megabench.cost.profile import Measurement, Profile, profile_for
from tests.planner.jobs import cluster

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
    reduction, gather = fabric.bandwidths(H100, TOPOLOGY)
    assert gather.collective.num_bytes == 2.56e8 and gather.collective.ranks_per_host == 8
    assert 0.25 < gather.share < 0.75
    assert gather.collective.label == "all-gather over 8 hosts"
    assert fabric.shares(H100, TOPOLOGY) == {"all_reduce": reduction.share, "all_gather": gather.share}


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
    ],
)
def test_a_topology_that_the_fabric_does_not_describe_is_refused(where, said):
    with pytest.raises(UserError, match=f"--fabric nccl.log .*{said}"):
        measured(H100).check(cluster(where))
