"""What groups cost by where they lie: pairs, and what hidden communication takes from compute."""

from dataclasses import replace

import pytest

from megabench.cost import network
from megabench.cost.geometry import Geometry
from megabench.cost.job import Candidate
from megabench.cost.network import Span
from megabench.cost.profile import profile_for, shipped_profiles
from megabench.hardware.topology import Network
from megabench.parallel.layout import Layout
from megabench.planner.costs import Costs
from megabench.planner.engines.sharding import Sharding
from tests.planner.jobs import costs, hosts, job, megatron

H200 = shipped_profiles()["h200"]


def world(gpus: int) -> Span:
    return Geometry.of(hosts(1, gpus), Layout().with_world_size(gpus), "topology").world


def test_two_ranks_alone_have_a_part_of_the_bandwidth():
    pair, four = world(2), world(4)
    nvlink = H200.links["nvlink"]
    assert nvlink.pair_share == pytest.approx(0.80, abs=0.01), "as benchmarks/calibrate-h200 measured"
    assert network.ring_bandwidth(H200, pair) == pytest.approx(nvlink.pair_share * network.ring_bandwidth(H200, four))
    links = H200.links | {"nvlink": nvlink.model_copy(update={"pair_share": 1.0})}
    whole = H200.model_copy(update={"links": links})
    assert network.ring_bandwidth(whole, pair) == network.ring_bandwidth(whole, four)


def test_rings_side_by_side_get_more_than_one_alone():
    """One over all ranks gets what a ring reaches; shards inside hosts have a ring a GPU, which share the NICs."""
    nics = hosts(2, 4, network="socket", network_gbits=80.0)
    measured = replace(nics, hosts=tuple(replace(host, ring_gbits=40.0) for host in nics.hosts))
    for topology, alone in ((nics, 10e9), (measured, 5e9)):
        where = Geometry.of(topology, Layout().with_world_size(8), "topology")
        assert network.ring_bandwidth(H200, where.world) == pytest.approx(alone)
        assert network.ring_bandwidth(H200, where.apart(4)) == pytest.approx(2.5e9), "a quarter of the NICs each"
    stages = Geometry.of(measured, Layout(pp=2).with_world_size(8), "topology").pp
    assert network.send_seconds(H200, replace(stages, sharing=1), 5e9, 4) == pytest.approx(1.0, rel=1e-3)


def test_an_exchange_sends_each_part_once_and_directly():
    """Inside a host over each GPU's own link; to other hosts over NICs that all of a host share."""
    one, two = hosts(1, 4), hosts(2, 4, network="socket", network_gbits=80.0)
    inside = Geometry.of(one, Layout().with_world_size(4), "topology").world
    across = Geometry.of(two, Layout().with_world_size(8), "topology").world
    num_bytes = 10**10
    assert network.exchange_seconds(H200, inside, num_bytes) == pytest.approx(
        network.gather_seconds(H200, inside, num_bytes), rel=1e-3
    )
    assert network.exchange_seconds(H200, across, num_bytes) == pytest.approx(4 * (4 / 8) * 1.0, rel=1e-3)


@pytest.mark.parametrize(("tp", "cp", "can"), [(1, 8, True), (2, 4, True), (4, 4, False), (1, 1, False)])
def test_context_parallelism_exchanges_heads_where_each_rank_gets_some(tp, cp, can):
    """Of eight KV heads; attention over whole sequences is cuDNN's, of chunks FlashAttention-2's."""
    work = job()
    assert work.shape.num_kv_heads == 8 and work.exchanges_heads(tp, cp) is can
    chunks = job(stack=replace(work.stack, exchanges_heads=False))
    topology = hosts(1, 8)
    fast, slow = (costs(each, topology).base.layer(tp, cp, 1).attention for each in (work, chunks))
    assert fast < slow if can else fast == slow


def test_hidden_bytes_cost_compute_as_over_nvlink():
    """The profile's slowdown is that of a ring over NVLink. A slow ring needs longer for the same bytes."""
    num_bytes, found = 16e9, {}
    networks: list[tuple[Network, float]] = [("efa", 3200.0), ("socket", 40.0)]
    for network_name, gbits in networks:
        topology = hosts(2, 4, network=network_name, network_gbits=gbits)
        base = costs(job(), topology).base
        group = Geometry.of(topology, Layout().with_world_size(8), "topology").world
        inside = Geometry.of(topology, Layout(tp=4).with_world_size(8), "topology").tp
        assert base.interference(inside, 1.0, num_bytes) == base.profile.interference > 0
        found[network_name] = seconds = network.gather_seconds(base.profile, group, num_bytes)
        over_nvlink = num_bytes / network.inner_bandwidth(group.host, "nvlink", base.profile.links["nvlink"])
        lost = base.profile.interference * min(seconds, over_nvlink) * 0.9
        tail = base.tail(2 * seconds, seconds, num_bytes, pieces=10, where=group, overlaps=True)
        assert tail == pytest.approx(0.1 * seconds + lost)
    assert found["socket"] > 2 * found["efa"]


def test_hybrid_shards_reduce_over_sockets_for_nothing():
    """HSDP gathers over NVLink and reduces over sockets too: backward is not charged for what sockets carry."""
    topology = hosts(2, 4, network_gbits=20.0, network="socket")
    hybrid = Candidate("fsdp", Layout(dp=8), 1, Sharding(3, shard_size=4))
    found = costs(job(global_batch=8), topology)
    charged = found.profile.model_copy(update={"interference": 1.0})
    forward = charged.interference * 32 * found.base.layer(1, 1, 1).forward
    more = Costs(found.job, topology, charged).estimate(hybrid).step_seconds - found.estimate(hybrid).step_seconds
    assert 0 < more < forward


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


def test_a_pipeline_adds_up_the_gradients_of_tied_embeddings():
    """Of the first stage and the last, fp32, each rank its part; nothing else is data-parallel here."""
    tied, untied = job("qwen3-0.6b", 4096, 32), job("llama3-8b", 4096, 32)
    assert tied.shape.tied_embeddings and not untied.shape.tied_embeddings
    for tp in (1, 2):
        topology = hosts(2, tp)
        found = megatron(topology, tp=tp, pp=2)
        ends = Geometry.of(topology, found.layout, "topology").ends
        assert (ends.size, ends.hosts) == (2, 2)
        expected = network.all_reduce_seconds(profile_for("NVIDIA H100 80GB HBM3"), ends, 4 * 151936 * 1024 / tp)
        assert costs(tied, topology).estimate(found).parts["dp"] == pytest.approx(expected)
        assert costs(untied, topology).estimate(found).parts["dp"] == 0
