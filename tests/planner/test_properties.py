"""What any cost model must obey, whatever its constants are."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.cost import network
from megabench.cost.geometry import Geometry
from megabench.cost.job import Stack
from megabench.planner.engines.sharding import Sharding
from megabench.planner.search import candidates
from tests.planner.jobs import cluster, costs, hosts, job, megatron, zero

SIZES = st.sampled_from([1, 2, 4, 8])


def total(model_job, topology, candidate):
    return costs(model_job, topology).memory(candidate).total


@given(tp=SIZES, pp=st.sampled_from([1, 2]), micro_batch=st.sampled_from([1, 2]))
@settings(max_examples=30, deadline=None)
def test_memory_falls_or_stays_with_tensor_parallelism(tp, pp, micro_batch):
    topology, work = hosts(4, 16), job(global_batch=256)
    narrow = megatron(topology, micro_batch, tp=tp, pp=pp)
    wide = megatron(topology, micro_batch, tp=2 * tp if tp < 8 else tp, pp=pp)
    # the replicas that share the optimizer are as many as tp leaves, so hold its shards out of the comparison
    a, b = costs(work, topology).memory(narrow), costs(work, topology).memory(wide)
    for part in ("weights", "gradients", "activations", "logits"):
        assert getattr(b, part) <= getattr(a, part) * (1 + 1e-9)


@given(pp=st.sampled_from([1, 2, 4]), tp=SIZES)
@settings(max_examples=30, deadline=None)
def test_weights_fall_with_pipeline_stages_and_activations_do_not_grow(pp, tp):
    # balanced stages differ in their layers, by what the output layer takes
    topology, work = hosts(8, 8), job(global_batch=512, stack=Stack(stages="even"))
    shallow, deep = megatron(topology, tp=tp, pp=pp), megatron(topology, tp=tp, pp=2 * pp)
    a, b = costs(work, topology).memory(shallow), costs(work, topology).memory(deep)
    assert b.weights <= a.weights and b.gradients <= a.gradients
    # each stage holds P micro-batches of a P-th of the layers
    assert b.activations <= a.activations * 1.01


@given(count=st.sampled_from([1, 2, 4, 8]), stage=st.sampled_from([1, 2, 3]))
@settings(max_examples=20, deadline=None)
def test_sharded_state_falls_with_replicas(count, stage):
    few, many = hosts(count, 8), hosts(2 * count, 8)
    work = job(global_batch=256)
    assert total(work, many, zero(many, stage)) <= total(work, few, zero(few, stage))
    assert total(work, many, megatron(many, tp=2)) <= total(work, few, megatron(few, tp=2))


def test_memory_falls_with_each_zero_stage():
    work, topology = job(), cluster()
    totals = [total(work, topology, zero(topology, stage)) for stage in (0, 1, 2, 3)]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


@given(
    seed=st.integers(0, 10**6),
    gbits=st.floats(10, 6400),
    nvlink=st.floats(20, 900),
    more=st.floats(1.0, 10.0),
    which=st.sampled_from(["network", "nvlink"]),
)
@settings(max_examples=80, deadline=None)
def test_more_bandwidth_never_slows_a_layout(seed, gbits, nvlink, more, which):
    work = job(global_batch=32)
    slow = hosts(2, 4, gbits, nvlink)
    fast = hosts(2, 4, gbits * (more if which == "network" else 1), nvlink * (more if which == "nvlink" else 1))
    everything = list(candidates(work, slow))
    for candidate in random.Random(seed).sample(everything, 20):
        before = costs(work, slow).estimate(candidate).step_seconds
        assert costs(work, fast).estimate(candidate).step_seconds <= before * (1 + 1e-9)


def test_one_gpu_has_no_communication():
    topology, work = hosts(1, 1), job(global_batch=4)
    for candidate in candidates(work, topology):
        estimate = costs(work, topology).estimate(candidate)
        assert estimate.exposed == {} and estimate.parts.get("bubble", 0.0) == pytest.approx(0.0, abs=1e-9)


@given(seed=st.integers(0, 10**6), tp=SIZES, pp=st.sampled_from([1, 2, 4]))
@settings(max_examples=30, deadline=None)
def test_predictions_do_not_depend_on_how_ranks_are_numbered(seed, tp, pp):
    topology, work = hosts(4, 8), job(global_batch=128)
    order = list(range(topology.world_size))
    random.Random(seed).shuffle(order)
    candidate = megatron(topology, tp=tp, pp=pp)
    plain = costs(work, topology).estimate(candidate)
    mixed = costs(work, topology.renumbered(order)).estimate(candidate)
    assert mixed.step_seconds == pytest.approx(plain.step_seconds)
    assert mixed.memory == plain.memory


def seconds_of_communication(work, topology, candidate):
    return costs(work, topology).estimate(candidate).parts["dp"]


def test_zero_3_communicates_with_every_micro_batch_and_megatron_once():
    """Twice the accumulation is twice the volume for ZeRO-3, and the same for a sharded optimizer."""
    topology = hosts(2, 8, network_gbits=100)
    little, much = job(global_batch=32), job(global_batch=64)
    candidate = zero(topology)
    ratio = seconds_of_communication(much, topology, candidate) / seconds_of_communication(little, topology, candidate)
    assert ratio == pytest.approx(2.0, rel=0.02)
    layout = megatron(topology, tp=2)
    assert seconds_of_communication(much, topology, layout) == pytest.approx(
        seconds_of_communication(little, topology, layout)
    )


def test_hpz_and_shards_inside_a_host_spare_the_network():
    topology, work = hosts(2, 8, network_gbits=50), job(global_batch=64)
    plain, hpz = zero(topology), zero(topology, hpz_size=8)
    assert seconds_of_communication(work, topology, hpz) < seconds_of_communication(work, topology, plain)
    assert total(work, topology, hpz) > total(work, topology, plain)


def test_a_tensor_parallel_group_across_hosts_is_slower_than_inside():
    topology = hosts(2, 8)
    layout = megatron(topology, tp=8).layout
    inside = Geometry.of(topology, layout, "topology").tp
    across = Geometry.of(topology, layout, "spread-tp").tp
    profile = costs(job(), topology).profile
    assert (inside.hosts, across.hosts) == (1, 2)
    assert network.gather_seconds(profile, across, 1e8) > network.gather_seconds(profile, inside, 1e8)


def test_kept_gathers_save_time_and_cost_memory():
    topology = hosts(2, 4, network_gbits=400)  # links so slow that products cannot hide what is sent
    candidate = megatron(topology, tp=8)
    plain, kept = (costs(job(stack=Stack(keeps_gathered=keeps)), topology) for keeps in (False, True))
    assert kept.estimate(candidate).step_seconds < plain.estimate(candidate).step_seconds
    assert kept.memory(candidate).activations > plain.memory(candidate).activations


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_weights_that_are_kept_are_gathered_once(engine: str):
    """A slow link then carries a gather and a reduction in fp32 a micro-batch, not two gathers: 6 bytes, not 8."""
    topology, work = hosts(2, 1, network_gbits=10), job(global_batch=2)
    plain = replace(zero(topology), engine=engine)
    kept = replace(plain, variant=Sharding(3, keeps_weights=True))
    ratio = seconds_of_communication(work, topology, kept) / seconds_of_communication(work, topology, plain)
    assert 0.7 < ratio < 0.85
    assert total(work, topology, kept) - total(work, topology, plain) > 0.75 * 2 * work.num_parameters


def test_replicas_of_shards_are_reduced_once_a_step():
    topology = hosts(2, 8, network_gbits=10)
    candidate = replace(zero(topology), engine="fsdp", variant=Sharding(3, shard_size=8))
    little, much = (seconds_of_communication(job(global_batch=16 * n), topology, candidate) for n in (1, 8))
    inside = hosts(1, 8)
    shards = replace(zero(inside), engine="fsdp")
    among = [seconds_of_communication(job(global_batch=8 * n), inside, shards) for n in (1, 8)]
    assert much - little < 1.2 * (among[1] - among[0]) + 1e-3, "more micro-batches cost what they cost inside a host"


def test_norms_of_heads_take_time():
    topology = hosts(1, 1)
    candidate = megatron(topology)
    work = job("qwen3-8b", global_batch=1)
    without = replace(work, shape=replace(work.shape, family="llama"))
    step, other = (costs(each, topology).estimate(candidate).step_seconds for each in (work, without))
    assert 1.0 < step / other < 1.05
