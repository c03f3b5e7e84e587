"""Who is to blame when no rank gets on."""

import threading
import time

from megabench.train.pulse import Pulse, accuse, stand, suspects

WAITING = "all_reduce (distributed_c10d.py:3252) in update (engine.py:156)"


def pulses(*told: tuple[int, str, bool]) -> list[Pulse]:
    return [
        Pulse(rank, f"host-{rank // 2}", 9, step, "training", place, waits)
        for rank, (step, place, waits) in enumerate(told)
    ]


def test_a_rank_that_stands_elsewhere() -> None:
    told = pulses((6, WAITING, True), (6, WAITING, True), (6, "read (socket.py:1)", False), (6, WAITING, True))
    assert accuse(told, set(), 12) == (
        "rank 2 (host-1) stands in read (socket.py:1) after step 6 of 12, and the others wait"
    )
    assert suspects(told, set()) == {2}


def test_a_rank_that_is_behind() -> None:
    told = pulses((7, WAITING, True), (6, WAITING, True))
    assert accuse(told, set(), 12).startswith("rank 1 (host-0) stands in all_reduce")


def test_a_rank_that_is_silent() -> None:
    told = pulses((6, WAITING, True), (5, "x", False), (6, "y", False))
    assert accuse(told, {1}, 12) == "rank 1 (host-0) gives no sign of life after step 5 of 12"
    assert suspects(told, {1}) == {1}


def test_the_usual_place_is_no_fault_wherever_it_is() -> None:
    told = pulses((6, "tolist (engine.py:1)", False), (6, "tolist (engine.py:1)", False), (6, "sleep (x.py:1)", False))
    assert accuse(told, set(), 12).startswith("rank 2 (host-1) stands in sleep (x.py:1)")


def test_none_can_be_told_apart() -> None:
    told = pulses((6, WAITING, True), (6, WAITING, True))
    text = accuse(told, set(), 12)
    assert suspects(told, set()) == {0, 1}
    assert "rank 0 (host-0)" in text and "rank 1 (host-0)" in text and "the others" not in text


def test_many_are_not_all_listed() -> None:
    assert "rank 3 (host-1) stands in a and 2 more ranks after" in accuse(pulses(*[(6, "a", False)] * 6), set(), 12)


def test_where_a_thread_stands() -> None:
    seen: list[tuple[str, bool]] = []

    def look(main: int) -> None:
        time.sleep(0.1)  # until the loop below runs
        seen.append(stand(main))

    thread = threading.Thread(target=look, args=(threading.get_ident(),))
    thread.start()
    stop = time.monotonic() + 10
    while not seen and time.monotonic() < stop:
        pass
    thread.join()
    ((place, waits),) = seen
    assert place.startswith("test_where_a_thread_stands (test_pulse.py:") and not waits
