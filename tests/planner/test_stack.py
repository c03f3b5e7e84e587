"""Properties of training programs that change a prediction."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from megabench.cost import compute, network
from megabench.cost.compute import Machine
from megabench.cost.geometry import Geometry
from megabench.cost.job import Stack
from megabench.cost.profile import profile_for, shipped_profiles
from megabench.parallel.layout import Layout
from tests.planner.jobs import costs, hosts, job, megatron, zero


def parts(topology, stack: Stack, precision: str = "bf16", **sizes: int) -> dict[str, float]:
    work = job(global_batch=32, precision=precision, stack=stack)
    return costs(work, topology).estimate(megatron(topology, **sizes)).parts


def test_user_buffers_hide_tensor_parallel_communication():
    """All but the last tile, and what the hidden reduce-scatters take from compute. Gathers take nothing."""
    topology = hosts(1, 8)
    stacks = [Stack(user_buffers=overlaps, launches_forward=22) for overlaps in (False, True)]
    plain, hidden = (parts(topology, stack, tp=2) for stack in stacks)
    assert 0.1 * plain["tp"] < hidden["tp"] < 0.6 * plain["tp"]
    assert all(plain[name] == hidden[name] for name in ("compute", "optimizer", "launch"))


def test_delayed_scaling_saves_casts_and_the_reduction_of_largest_values():
    topology = hosts(2, 4)
    layouts: list[dict[str, Any]] = [{"tp": 4}, {"cp": 2}]
    for sizes in layouts:
        plain, delayed = (parts(topology, Stack(delayed_scaling=is_so), "fp8", **sizes) for is_so in (False, True))
        (axis,) = sizes
        assert delayed["compute"] < plain["compute"] and delayed[axis] < plain[axis]
        in_bf16 = [parts(topology, Stack(delayed_scaling=is_so), **sizes) for is_so in (False, True)]
        assert in_bf16[0] == in_bf16[1]


def test_broadcasts_of_whole_tensors_pass_every_rank():
    """Up to one broadcast for each tensor: 32 layers of nine tensors. Each takes a hop per rank."""
    profile = profile_for("NVIDIA H100 80GB HBM3")
    hop, found = profile.links["efa"].hop_seconds, {}
    for num_hosts in (16, 128):
        topology = hosts(num_hosts, 8)
        work = job(global_batch=8 * num_hosts, stack=Stack(overlaps_parameters=False, broadcasts_tensors=True))
        plain = job(global_batch=8 * num_hosts, stack=Stack(overlaps_parameters=False))
        candidate = megatron(topology)
        more = [costs(which, topology).estimate(candidate).parts["dp"] for which in (work, plain)]
        found[num_hosts] = more[0] - more[1]
    assert found[16] > 0.8 * 128 * 127 * hop
    assert found[128] > 0.8 * 288 * 1023 * hop
    where = Geometry.of(hosts(16, 8), Layout().with_world_size(128), "topology").world
    one, many = (network.broadcast_seconds(profile, where, 1e9, calls) for calls in (1, 101))
    assert many - one == pytest.approx(100 * (profile.links["efa"].base_seconds + 127 * hop))


def test_only_the_megatron_engine_adds_gradients_to_their_buffers():
    topology = hosts(1, 8)
    adding, plain = (costs(work, topology) for work in (job(), job().without_added_gradients()))
    candidate = megatron(topology, tp=2)
    assert adding.estimate(candidate).step_seconds < plain.estimate(candidate).step_seconds
    assert adding.memory(candidate).logits < plain.memory(candidate).logits
    for engine in (zero(topology), replace(zero(topology), engine="fsdp"), replace(zero(topology, 0), engine="ddp")):
        assert adding.estimate(engine).step_seconds == plain.estimate(engine).step_seconds
        assert adding.memory(engine) == plain.memory(engine)
    tied = job("gpt2", seq_length=1024)
    assert not tied.adds_output_gradient and not job(bytes_of_gradient=2).adds_output_gradient


def test_short_sequences_and_few_heads_slow_attention_down():
    """At `attention_half_length`, attention reaches half of the FLOP/s of a long sequence."""
    machine = Machine(profile_for("NVIDIA H200"), peak=1e15)

    def rate(seq_length: int, micro_batch: int, flash_version: Literal[1, "cudnn"] = "cudnn") -> float:
        work = job(seq_length=seq_length, stack=Stack(flash_version=flash_version))
        forward, _ = compute.attention_seconds(machine, work, 1, 1, micro_batch)
        return micro_batch * seq_length**2 / forward

    half = round(machine.profile.attention_half_length)
    long = rate(64 * half, 8)
    assert rate(half, 512) / long == pytest.approx(0.5, rel=0.03)
    assert rate(half, 512, flash_version=1) > 0.95 * rate(64 * half, 8, flash_version=1)
    # 32 heads of 8192 tokens are 2048 tiles of 128 rows; the longest tiles keep 132 processors busy at the end
    assert rate(8192, 1) / rate(8192, 64) == pytest.approx(2048 / (2048 + 132), rel=0.01)


def test_context_parallelism_divides_attention_even_for_short_parts():
    """Chunks of megabench's engine take all keys at once. Transformer Engine's ring makes a call for each part."""
    machine = Machine(profile_for("NVIDIA H100 80GB HBM3"), peak=1e15)

    def overhead(cp: int, **stack: Any) -> float:
        work = job(seq_length=32768, stack=Stack(exchanges_heads=False, **stack))
        whole, part = (compute.attention_seconds(machine, work, 1, size, 1)[0] for size in (1, cp))
        return cp * part / whole

    flash_2 = 1 / machine.profile.flash_2_share
    assert overhead(2) == pytest.approx(flash_2, rel=0.05) and overhead(8) == pytest.approx(flash_2, rel=0.15)
    assert overhead(8, chunks_by_flash_2=False) > 1.2


def test_user_buffers_change_nothing_without_sequence_parallelism():
    topology = hosts(1, 8)
    plain, hidden = (
        parts(topology, Stack(user_buffers=overlaps, sequence_parallel=False), tp=2) for overlaps in (False, True)
    )
    assert plain == hidden


def test_unmeasured_gpus_take_what_their_origin_says():
    profiles = shipped_profiles()
    for name in ("attention_backward", "attention_half_length", "launch_seconds", "collective_launch_seconds"):
        assert profiles["blackwell"].origin[name].startswith("as measured on the H200")
        assert getattr(profiles["blackwell"], name) == getattr(profiles["h200"], name)
    for name in ("generic", "l40s"):
        assert profiles[name].attention_half_length == profiles["h100"].attention_half_length
