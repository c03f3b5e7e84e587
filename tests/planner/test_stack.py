"""Kernels and options of the engines that change a prediction."""

from dataclasses import replace

import pytest

from megabench.cost import compute
from megabench.cost.compute import GpuModel
from megabench.cost.job import Copies, Stack
from megabench.cost.profile import profile_for, shipped_profiles
from megabench.planner.engines.sharding import Sharding
from megabench.planner.predict import job_of
from megabench.record import KernelTraits
from tests.planner.jobs import cluster, costs, hosts, job, megatron, zero
from tests.study.records import make_record


def test_only_the_megatron_engine_adds_gradients_to_their_buffers():
    topology = hosts(1, 8)
    adding, plain = (costs(work, topology) for work in (job(), job().without_added_gradients()))
    candidate = megatron(topology, 2, tp=2)
    assert adding.estimate(candidate).step_seconds < plain.estimate(candidate).step_seconds
    assert adding.memory(candidate).logits < plain.memory(candidate).logits
    for engine in (zero(topology), replace(zero(topology), engine="fsdp"), replace(zero(topology, 0), engine="ddp")):
        assert adding.estimate(engine).step_seconds == plain.estimate(engine).step_seconds
        assert adding.memory(engine) == plain.memory(engine)
    tied = job("gpt2", seq_length=1024)
    assert not tied.adds_output_gradient and not job(bytes_of_gradient=2).adds_output_gradient


def test_copies_hide_tensor_parallel_communication_inside_a_host():
    def tp_seconds(num_hosts: int, copies: Copies, precision: str = "bf16") -> float:
        topology = hosts(num_hosts, 2 // num_hosts)
        work = job(seq_length=8192, global_batch=16, precision=precision, stack=Stack(copies=copies))
        return costs(work, topology).estimate(megatron(topology, 2, tp=2)).parts["tp"]

    for precision in ("bf16", "fp8"):
        assert tp_seconds(1, "auto", precision) < 0.7 * tp_seconds(1, "never", precision)
    assert tp_seconds(2, "always") == tp_seconds(2, "never"), "hosts exchange by NCCL"


def test_copies_change_the_order_of_layouts():
    topology = cluster("p5.48xlarge:2")
    fsdp = replace(zero(topology), engine="fsdp", variant=Sharding(3, keeps_weights=True))
    both: list[Copies] = ["auto", "never"]
    for copies in both:
        found = costs(job(seq_length=8192, global_batch=32, stack=Stack(copies=copies)), topology)
        tp4, dp16 = (found.estimate(each).step_seconds for each in (megatron(topology, 4, tp=4), fsdp))
        assert (tp4 < dp16) == (copies == "auto")


def test_buffers_of_copies_are_memory():
    """Two buffers of each of a gather and a reduce-scatter. Short products use copies only if a run asks for them."""
    topology, buffers = hosts(1, 2), 4 * 2 * 4096  # bytes per token

    def added(copies: Copies, tokens: int) -> float:
        with_copies, without = (
            costs(job(seq_length=tokens, stack=Stack(copies=each)), topology).memory(megatron(topology, 1, tp=2))
            for each in (copies, "never")
        )
        return with_copies.buffers - without.buffers

    assert added("auto", 8192) == pytest.approx(buffers * 8192, rel=0.3)
    assert added("auto", 512) == 0
    assert added("always", 512) == pytest.approx(buffers * 512, rel=0.3)


def test_short_sequences_and_few_heads_slow_attention_down():
    """At `attention_half_length`, attention reaches half of the FLOP/s of a long sequence."""
    machine = GpuModel(profile_for("NVIDIA H200"), peak=1e15)

    def rate(seq_length: int, micro_batch: int) -> float:
        forward, _ = compute.attention_seconds(machine, job(seq_length=seq_length), 1, 1, micro_batch)
        return micro_batch * seq_length**2 / forward

    half = round(machine.profile.attention_half_length)
    long = rate(64 * half, 8)
    assert rate(half, 512) / long == pytest.approx(0.5, rel=0.03)
    # 32 heads of 8192 tokens are 2048 tiles of 128 rows; the longest tiles keep 132 processors busy at the end
    assert rate(8192, 1) / rate(8192, 64) == pytest.approx(2048 / (2048 + 132), rel=0.01)


def test_context_parallelism_divides_attention_even_for_short_parts():
    """Chunks take all keys at once."""
    machine = GpuModel(profile_for("NVIDIA H100 80GB HBM3"), peak=1e15)

    def overhead(cp: int) -> float:
        work = job(seq_length=32768, stack=Stack(exchanges_heads=False))
        whole, part = (compute.attention_seconds(machine, work, 1, size, 1)[0] for size in (1, cp))
        return cp * part / whole

    flash_2 = 1 / machine.profile.flash_2_share
    assert overhead(2) == pytest.approx(flash_2, rel=0.05) and overhead(8) == pytest.approx(flash_2, rel=0.15)


def test_unmeasured_gpus_take_what_their_origin_says():
    profiles = shipped_profiles()
    for name in ("attention_backward", "attention_half_length", "launch_seconds", "collective_launch_seconds"):
        assert profiles["blackwell"].origin[name].startswith("as measured on the H200")
        assert getattr(profiles["blackwell"], name) == getattr(profiles["h200"], name)
    for name in ("generic", "l40s"):
        assert profiles[name].attention_half_length == profiles["h100"].attention_half_length


@pytest.mark.parametrize(
    ("traits", "given", "expected"),
    [
        (KernelTraits(copies_tp=True), None, "always"),
        (KernelTraits(), "auto", "never"),
        (None, None, "auto"),
        (None, "auto", "auto"),
        (None, "nccl", "never"),
        (None, "copy-engines", "always"),
    ],
)
def test_a_run_is_predicted_with_the_exchange_that_it_used(
    traits: KernelTraits | None, given: str | None, expected: Copies
) -> None:
    """A run that recorded no kernels decides as the planner does."""
    options = {"tp_overlap": given}
    record = make_record([5.0], engine="megatron", options=options, kernel_traits=traits)
    work = job_of(record)
    assert work is not None and work.stack.copies == expected
