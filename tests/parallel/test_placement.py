"""Placement over made-up clusters: what must hold for any of them, and the cases that people have."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.hardware.topology import Host, Topology, build, from_cluster, split
from megabench.parallel.layout import Layout, divisors, rank_groups
from megabench.parallel.placement import PlacementError, groups_on, number_ranges, place


def cluster(*hosts: tuple[int, int]) -> Topology:
    """Hosts of (ranks, ranks of an NVLink domain) each."""
    return build([(Host(f"node-{n}", "NVIDIA H200", "pcie", "efa"), *sizes) for n, sizes in enumerate(hosts)])


def sites(topology: Topology, ranks: list[int]) -> list[tuple[int, int]]:
    """Which physical place each of `ranks` is: host and seat."""
    return [(topology.host_of[rank], topology.seat_of[rank]) for rank in ranks]


def in_one_domain(topology: Topology, layout: Layout, axis: str) -> int:
    groups = rank_groups(layout)[axis]
    return sum(len({topology.domain_of[rank] for rank in ranks}) == 1 for ranks in groups)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Topology, Layout, list[int]]:
    """A cluster, a layout that fits its size, and an order in which a launcher may hand its ranks out."""
    hosts = []
    for _ in range(draw(st.integers(1, 4))):
        domain = draw(st.integers(1, 4))
        hosts.append((domain * draw(st.integers(1, 3)), domain))
    topology = cluster(*hosts)
    tp = draw(st.sampled_from(divisors(topology.world_size, 8)))
    cp = draw(st.sampled_from(divisors(topology.world_size // tp, 4)))
    pp = draw(st.sampled_from(divisors(topology.world_size // tp // cp, 4)))
    order = draw(st.permutations(range(topology.world_size)))
    return topology, Layout(tp=tp, cp=cp, pp=pp).with_world_size(topology.world_size), list(order)


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_any_cluster(made):
    topology, layout, order = made
    placement = place(topology.renumbered(order), layout)
    assert sorted(placement.launcher_ranks) == list(range(topology.world_size))
    assert placement.topology == topology.renumbered(order).renumbered(placement.launcher_ranks)
    # no numbering can put more TP groups, or CP groups of such, inside domains
    sizes = [len(ranks) for ranks in topology.ranks_by_domain]
    assert in_one_domain(placement.topology, layout, "tp") == sum(size // layout.tp for size in sizes)
    blocks = sum(size // (layout.tp * layout.cp) for size in sizes)
    assert in_one_domain(placement.topology, layout, "cp") >= blocks * layout.tp
    assert placement.topology.host_of[0] == topology.host_of[order[0]]


@settings(max_examples=200, deadline=None)
@given(clusters())
def test_the_order_of_the_launcher_does_not_matter(made):
    topology, layout, order = made
    first = next(rank for rank in range(topology.world_size) if topology.host_of[rank] == topology.host_of[order[0]])
    plain = [first, *(rank for rank in range(topology.world_size) if rank != first)]
    one, other = (place(topology.renumbered(ranks), layout).topology for ranks in (plain, order))
    everyone = list(range(topology.world_size))
    assert sites(one, everyone) == sites(other, everyone)


@settings(max_examples=200, deadline=None)
@given(clusters())
def test_stages_follow_the_hosts(made):
    """Where whole TP and CP groups fill the domains, a pipeline never returns to a host that it has left."""
    topology, layout, order = made
    if any(len(ranks) % (layout.tp * layout.cp) for ranks in topology.ranks_by_domain):
        return
    placed = place(topology.renumbered(order), layout).topology
    for ranks in rank_groups(layout)["pp"]:
        hosts = [placed.host_of[rank] for rank in ranks]
        changes = sum(a != b for a, b in pairwise(hosts))
        assert changes == len(set(hosts)) - 1


@pytest.mark.parametrize("hosts", [[(8, 8), (8, 8), (4, 4)], [(8, 4), (8, 4), (4, 4)], [(4, 4), (8, 8), (8, 4)]])
def test_uneven_hosts(hosts):
    layout = Layout(tp=4, pp=5).with_world_size(20)
    placement = place(cluster(*hosts), layout)
    assert not placement.warnings
    assert in_one_domain(placement.topology, layout, "tp") == 5


def test_round_robin_is_undone():
    two_hosts = cluster((4, 4), (4, 4))
    placement = place(two_hosts.renumbered([0, 4, 1, 5, 2, 6, 3, 7]), Layout(tp=4, pp=2).with_world_size(8))
    assert placement.launcher_ranks == (0, 2, 4, 6, 1, 3, 5, 7)
    assert [group.link for group in groups_on(Layout(4, 1, 2, 1, 1), placement.topology)] == ["nvlink"] * 2 + [
        "efa"
    ] * 4


def test_the_host_of_the_first_rank_stays_first():
    placement = place(cluster((2, 2), (2, 2)).renumbered([2, 3, 0, 1]), Layout(tp=2, pp=2).with_world_size(4))
    assert placement.launcher_ranks == (0, 1, 2, 3) and placement.topology.host_of == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("p4d.24xlarge:2", Layout(tp=16), ("ranks 0–15 spans hosts p4d-0, p4d-1", "EFA", "tp=8 fits")),
        (
            "p4d.24xlarge:3",
            Layout(tp=12),
            ("the TP group of ranks 0–11 (and 1 more) spans hosts p4d-0, p4d-1", "tp=4 fits"),
        ),
        ("g6e.48xlarge:1", Layout(tp=2), ("lies in no one NVLink domain of g6e-0", "PCIe", "only tp=1")),
    ],
)
def test_what_does_not_fit_is_said(name, layout, words):
    topology = from_cluster(name)
    layout = layout.with_world_size(topology.world_size)
    (warning,) = place(topology, layout).warnings
    assert all(word in warning for word in words), warning
    with pytest.raises(PlacementError, match="strict_placement: the TP group"):
        place(topology, layout, strict=True)


def test_a_launcher_that_scatters_tp_is_told_of_the_cure():
    topology, layout = cluster((2, 2), (2, 2)).renumbered([0, 2, 1, 3]), Layout(tp=2, pp=2).with_world_size(4)
    (warning,) = place(topology, layout, "launcher").warnings
    assert "placement=topology would keep every TP group inside" in warning
    assert place(topology, layout).warnings == ()


def test_context_parallelism_across_hosts_is_said():
    (warning,) = place(cluster((2, 2), (2, 2)), Layout(tp=2, cp=2).with_world_size(4)).warnings
    assert warning.startswith("the CP group of ranks 0, 2 (and 1 more) spans hosts node-0, node-1")


def test_spread_tp_puts_tp_across_and_stages_inside():
    layout = Layout(tp=2, pp=2).with_world_size(4)
    groups = groups_on(layout, place(cluster((2, 2), (2, 2)), layout, "spread-tp").topology)
    assert {(group.kind, group.link) for group in groups} == {("tp", "efa"), ("pp", "nvlink")}


def test_emulated_hosts_split_one_machine():
    whole = cluster((8, 4))
    halves = split(whole, 4)
    assert [len(ranks) for ranks in halves.ranks_by_host] == [2, 2, 2, 2]
    assert halves.emulated and halves.link(0, 1) == "nvlink" and halves.link(1, 2) == "socket"
    assert {host.network_gbits for host in halves.hosts} == {None}
    assert {host.network_gbits for host in split(whole, 4, gb_per_s=1.5).hosts} == {12}
    with pytest.raises(ValueError, match="emulate_hosts=2 splits one machine, but the ranks are on 2 hosts"):
        split(cluster((2, 2), (2, 2)), 2)
    with pytest.raises(ValueError, match="emulate_hosts=3 does not divide the 8 ranks"):
        split(whole, 3)


def test_number_ranges():
    assert number_ranges([0, 1, 2, 3, 8, 10, 11]) == "0–3, 8, 10, 11"


@pytest.mark.parametrize(("tp", "num_hosts"), [(8, 4), (16, 8), (72, 36), (4, 20)])
def test_tp_groups_stay_in_an_nvl72_rack(tp, num_hosts):
    topology = from_cluster(f"p6e-gb200.36xlarge:{num_hosts}")
    layout = Layout(tp=tp).with_world_size(topology.world_size)
    shuffled = random.Random(0).sample(range(topology.world_size), topology.world_size)
    placement = place(topology.renumbered(shuffled), layout, strict=True)
    assert placement.warnings == ()
    assert {group.link for group in groups_on(layout, placement.topology) if group.kind == "tp"} == {"nvlink"}


def test_pipelines_leave_a_rack_once():
    topology = from_cluster("p6e-gb200.36xlarge:36")
    layout = Layout(tp=8, pp=18).with_world_size(144)
    placed = place(topology, layout, strict=True).topology
    (pipeline, *_) = [[placed.node_of[rank] for rank in ranks] for ranks in rank_groups(layout)["pp"]]
    assert pipeline == [0] * 9 + [1] * 9


def test_the_rack_of_the_first_rank_stays_first():
    """Rank 0 is in the second rack: its host comes first, then the other hosts of its rack."""
    two_racks = cluster((2, 4), (2, 4), (2, 4), (2, 4))
    placed = place(two_racks.renumbered([6, 7, 0, 1, 2, 3, 4, 5]), Layout(tp=4, pp=2).with_world_size(8)).topology
    assert placed.host_of == (3, 3, 2, 2, 0, 0, 1, 1)


def test_a_group_larger_than_a_rack_is_said():
    topology = from_cluster("p6e-gb200.36xlarge:36")
    (warning,) = place(topology, Layout(tp=144).with_world_size(144)).warnings
    assert "spans hosts p6e-gb200-0, …, p6e-gb200-35 (36 hosts) and will ride on EFA" in warning
    assert "the NVLink domains have 72 ranks each, which tp=72 fits" in warning
