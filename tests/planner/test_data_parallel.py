"""What data-parallel engines move beside their communication."""

from typing import Any

import pytest

from megabench.cost.job import Candidate, Recompute
from megabench.parallel.layout import Layout
from megabench.planner.costs import Costs
from megabench.planner.engines.data_parallel_cost import DataParallel
from megabench.planner.engines.sharding import Offload, Sharding
from megabench.planner.search import settings_of
from tests.planner.jobs import costs, hosts, job, megatron, zero

FOUR = hosts(1, 4)


def data_parallel(engine: str, recompute: Recompute = "none") -> Candidate:
    return Candidate(engine, Layout(dp=4), 1, Sharding(3 if engine == "fsdp" else 0), recompute)


def bytes_a_parameter(engine: str, stage: int = 0, work=None, **settings) -> float:
    """What one micro-batch copies, beyond the 12 bytes of a gradient's sum in fp32."""
    work = (work or job()).without_added_gradients()
    candidate = Candidate(engine, Layout(dp=4), 1, Sharding(stage), **settings)
    found = DataParallel(costs(work, FOUR).base)
    rate = found.profile.memory_gb_per_s * 1e9
    return found._copying_seconds(candidate) * rate / work.num_parameters


@pytest.mark.parametrize(
    ("engine", "stage", "expected"),
    [
        ("deepspeed", 3, 4 + 6 + 8 + 8 + 12 / 4 - 12),  # bucket, cast, by rank, divided; its own part added
        ("deepspeed", 2, 6 + 8 + 8 + 8 + 20 / 4 - 12),  # cast, bucket, divided, by rank; its own part back and added
        ("deepspeed", 1, 6 + 12 - 12),  # cast and added
        ("fsdp", 3, 8 + 6 + (2 * (6 + 4) + 12) / 4 - 12),  # twice cast, in and out; gradients in, and added
    ],
)
def test_what_an_engine_copies(engine: str, stage: int, expected: float):
    assert bytes_a_parameter(engine, stage) == pytest.approx(expected)


def test_gradients_in_16_bits_are_not_cast():
    assert bytes_a_parameter("deepspeed", 3, job(bytes_of_gradient=2)) == pytest.approx(4 + 8 + 6 / 4 - 8)


def test_nothing_is_cast_in_fp32():
    in_fp32 = job(precision="fp32")
    assert bytes_a_parameter("fsdp", 3, in_fp32) == pytest.approx(16 + 8 + (2 * 8 + 12) / 4 - 12)


def launch_seconds(model: str, micro_batch: int, engine: str, stage: int = 0) -> float:
    """What a step on one GPU waits for the host."""
    work = job(model, seq_length=128, global_batch=micro_batch)
    candidate = Candidate(engine, Layout(dp=1), micro_batch, Sharding(stage))
    return DataParallel(costs(work, hosts(1, 1)).base).parts(candidate)["launch"]


def test_hooks_are_waited_for_where_a_gpu_has_little_to_do():
    plain, zero1, zero3 = (launch_seconds("gpt2", 8, "deepspeed", stage) for stage in (0, 1, 3))
    assert 0 < plain < zero1 < zero3
    tensors = 12 * 12  # of twelve layers
    launch = costs(job(), FOUR).profile.launch_seconds
    assert zero1 - plain == pytest.approx(tensors * 16 * launch)
    assert zero3 - plain == pytest.approx(tensors * (17 + 34) * launch)
    assert launch_seconds("llama3-8b", 256, "deepspeed", 3) == 0, "hidden behind a GPU that is busy"


def offload_seconds(
    micro_batches: int, engine: str = "deepspeed", stage: int = 3, offload: Offload = "all", **settings
) -> float:
    work = job(global_batch=4 * micro_batches, **settings)
    candidate = Candidate(engine, Layout(dp=4), 1, Sharding(stage, offload))
    return DataParallel(costs(work, FOUR).base).parts(candidate)["offload"]


@pytest.mark.parametrize(
    ("engine", "stage", "offload", "copied"),
    [
        ("deepspeed", 3, "all", 2 * 4 + 2 * 2),  # gradients there and back; weights for both gathers
        ("deepspeed", 3, "optimizer", 2 * 4),
        ("deepspeed", 2, "optimizer", 0),  # summed up on the GPU
        ("fsdp", 3, "all", 4 + 2 * 4),
    ],
)
def test_what_another_micro_batch_copies_to_the_host(engine: str, stage: int, offload: Offload, copied: int):
    more = offload_seconds(3, engine, stage, offload) - offload_seconds(2, engine, stage, offload)
    rate = costs(job(), FOUR).profile.host_copy_gb_per_s * 1e9
    assert more * rate / (job().num_parameters / 4) == pytest.approx(copied)


def test_gradients_in_16_bits_are_added_up_on_the_gpu_and_wait_on_the_host():
    in_bf16: dict[str, Any] = {"stage": 2, "offload": "optimizer", "bytes_of_gradient": 2}
    rate = costs(job(), FOUR).profile.host_copy_gb_per_s * 1e9 / (job().num_parameters / 4)
    assert (offload_seconds(3, **in_bf16) - offload_seconds(2, **in_bf16)) * rate == pytest.approx(2 * 2)
    assert offload_seconds(1, **in_bf16) == offload_seconds(1, stage=2, offload="optimizer")
    in_bf16["stage"] = 1
    assert offload_seconds(3, **in_bf16) == offload_seconds(1, **in_bf16), "ZeRO-1 reduces once"


def test_what_the_host_does_for_deepspeed():
    """AdamW, clipping, and a cast of the new weights, beside the copies of one micro-batch."""
    dram = costs(job(), FOUR).profile.dram_gb_per_s * 1e9
    copies = costs(job(), FOUR).profile.host_copy_gb_per_s * 1e9
    on_host = {
        stage: offload_seconds(1, stage=stage, offload="optimizer") * dram / job().num_parameters
        - (gradients + 2) * dram / copies / 4
        for stage, gradients in ((3, 3 * 4), (2, 4))
    }
    assert on_host == pytest.approx({3: 28 + 14, 2: 28 + 14})


def test_fsdp_reduces_one_end_at_a_time():
    memory = costs(job(), FOUR).estimate(data_parallel("fsdp")).memory
    assert memory.buffers == 4 * job().layer_parameters + (4 + 2) * job().embedding_parameters


def test_zero3_holds_no_gradients_beside_an_offloaded_optimizer():
    held = {
        stage: costs(job(), FOUR).estimate(zero(FOUR, stage=stage, offload="optimizer")).memory.gradients
        for stage in (2, 3)
    }
    assert held == {2: 4 * job().num_parameters / 4, 3: 0.0}


def test_a_planned_zero3_is_the_one_that_is_predicted():
    assert settings_of(zero(FOUR))["zero_leaf_layers"] is True
    assert "zero_leaf_layers" not in settings_of(zero(FOUR, stage=2))


@pytest.mark.parametrize(
    ("candidate", "share"),
    [
        (zero(FOUR, stage=3), 0.3),
        (data_parallel("fsdp"), 0.1),  # in one stream, in order
        (zero(FOUR, stage=2), 0.1),
        (zero(FOUR, stage=1), 0.1),
        (megatron(FOUR, tp=2), 0.1),
    ],
)
def test_fragments_are_more_where_weights_come_and_go(candidate: Candidate, share: float):
    check_fragments(candidate, share)


def check_fragments(candidate: Candidate, share: float) -> None:
    """The allocator's share is `share` where a profile tells it for weights that come and go, and 0.1 otherwise."""
    profile = costs(job(), FOUR).profile
    for gathering, expected in ((0.3, share), (None, 0.1)):
        shares = {"allocator_share": 0.1, "gather_allocator_share": gathering}
        memory = Costs(job(), FOUR, profile.model_copy(update=shares)).memory(candidate)
        comes_and_goes = memory.activations + memory.logits + memory.buffers
        assert memory.allocator == pytest.approx(expected * comes_and_goes)
