"""Properties of other training programs that change a prediction."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from megabench.cost.geometry import Geometry
from megabench.cost.profile import profile_for
from megabench.models.find import find_model
from megabench.parallel.layout import Layout
from megabench.planner.engines.sharding import Sharding
from megabench.planner.search import candidates
from tests.planner.jobs import costs, hosts, job, megatron, zero
from tools.planner_validation.program_costs import ProgramCosts, ProgramDataParallel, broadcast_seconds, held_bytes
from tools.planner_validation.programs import Program, ProgramJob, ProgramProfile

PROFILE = ProgramProfile(**profile_for("NVIDIA H100 80GB HBM3").model_dump(), flash_1_share=0.33)


def program_job(program: Program, seq_length: int = 4096, global_batch: int = 64, **settings) -> ProgramJob:
    return ProgramJob(find_model("llama3-8b"), seq_length, global_batch, stack=program, **settings)


def program_costs(program: Program, topology, **settings) -> ProgramCosts:
    return ProgramCosts(program_job(program, **settings), topology, PROFILE)


def parts(topology, program: Program, precision: str = "bf16", **sizes: int) -> dict[str, float]:
    found = program_costs(program, topology, global_batch=32, precision=precision)
    return found.estimate(megatron(topology, **sizes)).parts


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_program_like_megabench_costs_the_same(precision: str):
    topology = hosts(2, 4)
    like = Program(copies="auto", fused_loss=True, stages="balanced", launches_forward=85, launches_fp8=55)
    ours, theirs = costs(job(precision=precision), topology), program_costs(like, topology, precision=precision)
    compared = [each for each in candidates(job(precision=precision), topology) if each.engine in ("megatron", "fsdp")]
    assert len({each.layout for each in compared}) > 10
    for candidate in compared:
        here, there = ours.estimate(candidate), theirs.estimate(candidate)
        assert there.parts == pytest.approx(here.parts), candidate.name
        assert there.memory.total == pytest.approx(here.memory.total), candidate.name


def test_user_buffers_hide_tensor_parallel_communication():
    """All but the last tile, and what the hidden reduce-scatters take from compute. Gathers take nothing."""
    topology = hosts(1, 8)
    plain, hidden = (parts(topology, Program(user_buffers=overlaps), tp=2) for overlaps in (False, True))
    assert 0.1 * plain["tp"] < hidden["tp"] < 0.6 * plain["tp"]
    assert all(plain[name] == hidden[name] for name in ("compute", "optimizer", "launch"))


def test_user_buffers_change_nothing_without_sequence_parallelism():
    topology = hosts(1, 8)
    plain, hidden = (
        parts(topology, Program(user_buffers=overlaps, sequence_parallel=False), tp=2) for overlaps in (False, True)
    )
    assert plain == hidden


def test_without_sequence_parallelism_norms_and_sends_are_whole():
    topology, candidate = hosts(2, 8), megatron(hosts(2, 8), tp=4, pp=2)
    divided, whole = (program_costs(Program(sequence_parallel=is_so), topology) for is_so in (True, False))
    a, b = divided.estimate(candidate), whole.estimate(candidate)
    assert b.parts["compute"] > a.parts["compute"] and b.parts["pp"] > a.parts["pp"]
    assert b.memory.activations > a.memory.activations and b.memory.buffers > a.memory.buffers
    alone = megatron(topology, tp=1, pp=2)
    assert divided.estimate(alone).parts == whole.estimate(alone).parts
    assert divided.memory(alone) == whole.memory(alone)


def test_delayed_scaling_saves_casts_and_the_reduction_of_largest_values():
    topology = hosts(2, 4)
    layouts: list[dict[str, Any]] = [{"tp": 4}, {"cp": 2}]
    for sizes in layouts:
        plain, delayed = (parts(topology, Program(delayed_scaling=is_so), "fp8", **sizes) for is_so in (False, True))
        (axis,) = sizes
        assert delayed["compute"] < plain["compute"] and delayed[axis] < plain[axis]
        in_bf16 = [parts(topology, Program(delayed_scaling=is_so), **sizes) for is_so in (False, True)]
        assert in_bf16[0] == in_bf16[1]


def test_broadcasts_of_whole_tensors_pass_every_rank():
    """Up to one broadcast for each tensor: 32 layers of nine tensors. Each takes a hop per rank."""
    hop = PROFILE.links["infiniband"].hop_seconds
    program = Program(overlaps_parameters=False, broadcasts_tensors=True)
    for num_hosts, num_broadcasts in ((16, 128), (128, 288)):
        topology = hosts(num_hosts, 8, network="infiniband")
        found = program_costs(program, topology, global_batch=8 * num_hosts).estimate(megatron(topology))
        assert found.parts["dp"] > num_broadcasts * (8 * num_hosts - 1) * hop
        alone = broadcast_seconds(PROFILE, Geometry.of(topology, found.candidate.layout, "topology").replicas, 1.0, 1)
        assert alone == pytest.approx((8 * num_hosts - 1) * hop, rel=0.2)
    where = Geometry.of(hosts(16, 8), Layout().with_world_size(128), "topology").world
    one, many = (broadcast_seconds(PROFILE, where, 1e9, calls) for calls in (1, 101))
    efa = PROFILE.links["efa"]
    assert many - one == pytest.approx(100 * (efa.base_seconds + 127 * efa.hop_seconds))


def test_flash_attention_1_is_slow_but_as_fast_for_short_sequences():
    topology, half = hosts(1, 1), round(PROFILE.attention_half_length)
    tokens = 512 * 64 * half

    def rate(seq_length: int, flash_version: Literal[1, 2, "cudnn"]) -> float:
        base = program_costs(Program(flash_version=flash_version), topology, seq_length=seq_length).base
        return tokens * seq_length / base.layer(1, 1, tokens // seq_length).attention

    assert rate(half, 1) > 0.95 * rate(64 * half, 1)
    assert rate(64 * half, 1) == pytest.approx(0.33 * rate(64 * half, "cudnn"), rel=0.03)
    for length in (half, 64 * half):
        assert rate(length, 2) == pytest.approx(PROFILE.flash_2_share * rate(length, "cudnn"))


def test_attention_in_a_ring_makes_a_call_for_each_part():
    topology = hosts(1, 8)
    rings = (
        program_costs(Program(exchanges_heads=False, passes_keys=passes), topology, seq_length=32768).base
        for passes in (False, True)
    )
    chunks, ring = ({cp: base.layer(1, cp, 1).attention * cp for cp in (1, 8)} for base in rings)
    assert ring[1] == chunks[1] and ring[8] > 1.2 * ring[1]
    assert chunks[8] == pytest.approx(chunks[1] / PROFILE.flash_2_share, rel=0.15)


def test_what_a_program_does_costs_memory_and_time():
    topology = hosts(2, 8)
    plain, candidate = Program(), megatron(topology, tp=2)
    lean = program_costs(plain, topology).memory(candidate)
    for name, part in (
        ("accumulates_at_end", "gradients"),
        ("copies_kept", "activations"),
        ("dropout", "activations"),
        ("holds_sent", "buffers"),
    ):
        given: dict[str, Any] = {name: True}
        other = program_costs(replace(plain, **given), topology).memory(candidate)
        assert getattr(other, part) > getattr(lean, part) and other.total > lean.total
    step = program_costs(plain, topology).estimate(candidate).step_seconds
    for changes in (
        {"flattens_shards": True},
        {"loss_bytes": (76, 28)},
        {"dropout": True},
        {"overlaps_gradients": False},
        {"overlaps_sharded_gradients": False},
        {"overlaps_parameters": False},
    ):
        assert program_costs(replace(plain, **changes), topology).estimate(candidate).step_seconds > step, changes


def test_nothing_is_held_for_collectives_that_are_not_made():
    topology, work = hosts(1, 8), program_job(Program(holds_sent=True))
    assert held_bytes(work, megatron(topology)) == 0.0
    assert held_bytes(work, megatron(topology, tp=2)) == held_bytes(work, megatron(topology, tp=8)) > 0.0


def test_filled_stages_leave_the_last_one_with_less():
    work = program_job(Program(fills_stages=True))
    assert work.output_layers == pytest.approx(128256 * 4096 / work.layer_parameters)
    assert work.chunk_layers(Layout(pp=4)) == ((9,), (9,), (8,), (6,))
    assert replace(work, stack=Program()).chunk_layers(Layout(pp=4)) == ((8,), (8,), (8,), (8,))


def test_flat_parameters_are_communicated_where_they_lie():
    topology = hosts(1, 4)
    candidate = replace(zero(topology), engine="fsdp", variant=Sharding(3))
    copies = [
        ProgramDataParallel(program_costs(Program(flat_parameters=is_flat), topology).base)._copying_seconds(candidate)
        for is_flat in (False, True)
    ]
    assert copies[0] > copies[1] == 0
