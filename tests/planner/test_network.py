"""What groups cost by where they lie: pairs, and what hidden communication takes from compute."""

from dataclasses import replace

import pytest

from megabench.hardware.topology import Link
from megabench.parallel.layout import Layout
from megabench.planner import network
from megabench.planner.geometry import Geometry
from megabench.planner.network import Span
from megabench.planner.profile import LinkCost, Profile, shipped_profiles
from tests.planner.jobs import costs, hosts, job, megatron

H200 = shipped_profiles()["h200"]


def world(gpus: int) -> Span:
    return Geometry.of(hosts(1, gpus), Layout().with_world_size(gpus), "topology").world


def with_links(**costs: LinkCost) -> Profile:
    links: dict[Link, LinkCost] = {**H200.links, **costs}  # type: ignore[dict-item]
    return H200.model_copy(update={"links": links})


def test_two_ranks_alone_have_a_part_of_the_bandwidth():
    pair, four = world(2), world(4)
    nvlink = H200.links["nvlink"]
    assert nvlink.pair_share == pytest.approx(0.80, abs=0.01), "as benchmarks/calibrate-h200 measured"
    assert network.ring_bandwidth(H200, pair) == pytest.approx(nvlink.pair_share * network.ring_bandwidth(H200, four))
    whole = with_links(nvlink=nvlink.model_copy(update={"pair_share": 1.0}))
    assert network.ring_bandwidth(whole, pair) == network.ring_bandwidth(whole, four)


def test_compute_hides_behind_sockets():
    """A step that sockets determine takes what they need for gradients and weights, and no more for what they hide."""
    work, topology = job(seq_length=2048, global_batch=16), hosts(2, 1, network_gbits=20.0, network="socket")
    candidate = replace(megatron(topology, micro_batch=8), recompute="full")
    found = costs(work, topology)
    num_bytes = (work.bytes_of_gradient + work.bytes_of_value) * work.num_parameters
    sockets = network.gather_seconds(
        found.profile, Geometry.of(topology, candidate.layout, "topology").world, num_bytes
    )
    assert found.estimate(candidate).step_seconds == pytest.approx(sockets, rel=0.05)
