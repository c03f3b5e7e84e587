"""The timeline against closed forms, against itself at full length, and against what cannot be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.cost import schedule
from megabench.cost.schedule import Chunk, simulate
from megabench.planner.engines.megatron_memory import in_flight, layers_in_flight


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 64])
def test_1f1b_of_equal_stages_has_the_known_bubble(pp, micro_batches):
    timeline = simulate([[Chunk(1.0, 2.0)]] * pp, micro_batches, send=0.0)
    assert timeline.seconds == pytest.approx(3.0 * (micro_batches + pp - 1))


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("vp", [2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_interleaving_divides_the_bubble(pp, vp, rounds):
    timeline = simulate([[Chunk(1.0 / vp, 2.0 / vp)] * vp] * pp, rounds * pp, send=0.0, blocking=False)
    assert timeline.seconds == pytest.approx(3.0 * (rounds * pp + (pp - 1) / vp))


@given(
    forward=st.floats(0.1, 2.0),
    backward=st.floats(0.1, 4.0),
    heavier=st.lists(st.floats(1.0, 1.3), min_size=2, max_size=6),
    chunks=st.sampled_from([1, 2, 3]),
    rounds=st.integers(5, 9),
    send=st.floats(0.0, 0.5),
    blocking=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_long_step_is_a_short_one_drawn_out(forward, backward, heavier, chunks, rounds, send, blocking):
    stages = [[Chunk(forward * factor, backward * factor)] * chunks for factor in heavier]
    micro_batches, blocking = rounds * len(stages), blocking and chunks == 1
    drawn = simulate(stages, micro_batches, send, blocking)
    whole = schedule._simulate(stages, micro_batches, send, blocking)
    assert drawn.seconds == pytest.approx(whole.seconds, rel=0.03)


@given(
    seconds=st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(0.1, 4.0)), min_size=1, max_size=6),
    chunks=st.sampled_from([1, 2, 3]),
    rounds=st.integers(1, 5),
    send=st.floats(0.0, 0.5),
    blocking=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_no_step_is_shorter_than_its_lower_bound(seconds, chunks, rounds, send, blocking):
    chunks = chunks if len(seconds) > 1 else 1
    # the chunks of a stage take unequal times
    stages = [[Chunk(*pair), *(Chunk(*other) for other in seconds[1:chunks])] for pair in seconds]
    stages = [(stage * chunks)[:chunks] for stage in stages]
    micro_batches = rounds * len(stages)
    found = schedule._simulate(stages, micro_batches, send, blocking)
    assert found.seconds >= schedule.shortest(stages, micro_batches, send, blocking) * (1 - 1e-9)


@pytest.mark.parametrize(("pp", "vp", "micro_batches"), [(4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 3, 8), (4, 2, 4)])
def test_what_a_stage_holds_is_what_its_order_leaves_open(pp, vp, micro_batches):
    for stage in range(pp):
        held = most = 0
        for is_forward, _, _ in schedule.order(stage, pp, vp, micro_batches):
            held += 1 if is_forward else -1
            most = max(most, held)
        assert most / vp == pytest.approx(in_flight(stage, pp, vp, micro_batches))


def test_every_micro_batch_goes_through_every_chunk_once_each_way():
    operations = schedule.order(1, 4, 2, 8)
    assert len(operations) == len(set(operations)) == 2 * 2 * 8


def test_a_blocking_send_costs_the_sender():
    stages = [[Chunk(1.0, 2.0)]] * 2
    assert simulate(stages, 8, 0.1, True).seconds > simulate(stages, 8, 0.1, False).seconds


def test_the_slower_of_two_streams_decides():
    assert schedule.two_streams(1.0, 0.5, 10, 0.0) == pytest.approx(10.5)
    assert schedule.two_streams(0.5, 1.0, 10, 0.0) == pytest.approx(10.5)
    assert schedule.hidden_tail(10.0, 1.0, 10) == pytest.approx(0.1)
    assert schedule.hidden_tail(1.0, 10.0, 10) == pytest.approx(9.1)


def test_a_long_chunk_delays_the_other_stages():
    """With equal loads on average, stages wait for a long chunk of another stage, but not for chunks of one length."""
    long, short = Chunk(1.5, 3.0), Chunk(0.5, 1.0)
    equal, crossed, aligned = (
        simulate(stages, 32, 0.0, blocking=False)
        for stages in ([[Chunk(1.0, 2.0)] * 2] * 4, [[long, short], [short, long]] * 2, [[long, short]] * 4)
    )
    assert crossed.busy == aligned.busy == pytest.approx(equal.busy)
    assert crossed.seconds > 1.05 * equal.seconds
    assert crossed.seconds > aligned.seconds


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("num_micro_batches", [4, 8, 40])
def test_a_stage_with_unequal_chunks_holds_what_its_order_leaves_open(stage, num_micro_batches):
    chunks, held, most = (3, 1), 0, 0
    for is_forward, chunk, _ in schedule.order(stage, 4, 2, num_micro_batches):
        held += chunks[chunk] if is_forward else -chunks[chunk]
        most = max(most, held)
    assert layers_in_flight(stage, 4, chunks, num_micro_batches) == most
    assert layers_in_flight(stage, 4, (2, 2), num_micro_batches) == 4 * in_flight(stage, 4, 2, num_micro_batches)
