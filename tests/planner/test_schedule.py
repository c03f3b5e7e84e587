"""The timeline against closed forms, against itself at full length, and against what cannot be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.cost import schedule
from megabench.cost.schedule import Stage, simulate
from megabench.specs.megatron_memory import in_flight


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 64])
def test_1f1b_of_equal_stages_has_the_known_bubble(pp, micro_batches):
    timeline = simulate([Stage(1.0, 2.0)] * pp, 1, micro_batches, send=0.0)
    assert timeline.seconds == pytest.approx(3.0 * (micro_batches + pp - 1))


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("vp", [2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_interleaving_divides_the_bubble(pp, vp, rounds):
    timeline = simulate([Stage(1.0 / vp, 2.0 / vp)] * pp, vp, rounds * pp, send=0.0, blocking=False)
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
    stages = [Stage(forward * factor, backward * factor) for factor in heavier]
    micro_batches, blocking = rounds * len(stages), blocking and chunks == 1
    drawn = simulate(stages, chunks, micro_batches, send, blocking)
    whole = schedule._simulate(stages, chunks, micro_batches, send, blocking)
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
    stages = [Stage(*pair) for pair in seconds]
    chunks = chunks if len(stages) > 1 else 1
    micro_batches = rounds * len(stages)
    found = schedule._simulate(stages, chunks, micro_batches, send, blocking)
    assert found.seconds >= schedule.shortest(stages, chunks, micro_batches, send, blocking) * (1 - 1e-9)


@pytest.mark.parametrize(("pp", "vp", "micro_batches"), [(4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 3, 8)])
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
    stages = [Stage(1.0, 2.0)] * 2
    assert simulate(stages, 1, 8, 0.1, True).seconds > simulate(stages, 1, 8, 0.1, False).seconds


def test_the_slower_of_two_streams_decides():
    assert schedule.two_streams(1.0, 0.5, 10, 0.0) == pytest.approx(10.5)
    assert schedule.two_streams(0.5, 1.0, 10, 0.0) == pytest.approx(10.5)
    assert schedule.hidden_tail(10.0, 1.0, 10) == pytest.approx(0.1)
    assert schedule.hidden_tail(1.0, 10.0, 10) == pytest.approx(9.1)
