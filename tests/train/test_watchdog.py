"""The watchdog ends a run that hangs, and names the rank that the others wait for."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from megabench.runtime.messages import Failure, read_failure
from megabench.runtime.rendezvous import Rendezvous
from megabench.train.exits import Exits
from megabench.train.watchdog import Heartbeat, Watchdog, describe_stragglers, find_stragglers, place_of

WAITING = "all_reduce (distributed_c10d.py:3252) in update (engine.py:156)"


def heartbeats(*told: tuple[int, str, bool]) -> list[Heartbeat]:
    return [
        Heartbeat(rank, f"host-{rank // 2}", 9, step, "training", place, waits)
        for rank, (step, place, waits) in enumerate(told)
    ]


def test_a_rank_that_stands_elsewhere() -> None:
    told = heartbeats((6, WAITING, True), (6, WAITING, True), (6, "read (socket.py:1)", False), (6, WAITING, True))
    assert describe_stragglers(told, set(), 12) == (
        "rank 2 (host-1) is in read (socket.py:1) after step 6 of 12, and the others wait"
    )
    assert find_stragglers(told, set()) == {2}


def test_a_rank_that_is_behind() -> None:
    told = heartbeats((7, WAITING, True), (6, WAITING, True))
    assert describe_stragglers(told, set(), 12).startswith("rank 1 (host-0) is in all_reduce")


def test_a_rank_that_is_silent() -> None:
    told = heartbeats((6, WAITING, True), (5, "x", False), (6, "y", False))
    assert describe_stragglers(told, {1}, 12) == "rank 1 (host-0) has stopped sending heartbeats after step 5 of 12"
    assert find_stragglers(told, {1}) == {1}


def test_the_usual_place_is_no_fault_wherever_it_is() -> None:
    told = heartbeats(
        (6, "tolist (engine.py:1)", False), (6, "tolist (engine.py:1)", False), (6, "sleep (x.py:1)", False)
    )
    assert describe_stragglers(told, set(), 12).startswith("rank 2 (host-1) is in sleep (x.py:1)")


def test_none_can_be_told_apart() -> None:
    told = heartbeats((6, WAITING, True), (6, WAITING, True))
    text = describe_stragglers(told, set(), 12)
    assert find_stragglers(told, set()) == {0, 1}
    assert "rank 0 (host-0)" in text and "rank 1 (host-0)" in text and "the others" not in text


def test_many_are_not_all_listed() -> None:
    assert "rank 3 (host-1) is in a and 2 more ranks after" in describe_stragglers(
        heartbeats(*[(6, "a", False)] * 6), set(), 12
    )


def test_where_a_thread_stands() -> None:
    seen: list[tuple[str, bool]] = []
    rounds: list[int] = []

    def look(main: int) -> None:
        while not rounds:  # until the loop below runs
            time.sleep(0.001)
        seen.append(place_of(main))

    thread = threading.Thread(target=look, args=(threading.get_ident(),))
    thread.start()
    while not seen:
        rounds[:] = [1]
    thread.join()
    ((place, waits),) = seen
    assert place.startswith("test_where_a_thread_stands (test_watchdog.py:") and not waits


def test_frames_that_change_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frame:
        f_back, f_code = "no frame", threading.Thread.run.__code__

    monkeypatch.setattr("megabench.train.watchdog.sys._current_frames", lambda: {1: Frame()})
    assert place_of(1) == ("an unknown function", False)


def test_frames_of_a_rank_with_progress_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def place(thread: int) -> tuple[str, bool]:
        read.append(thread)
        return "a function", False

    monkeypatch.setattr("megabench.train.watchdog.place_of", place)
    now = 100.0
    monkeypatch.setattr("megabench.train.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    store = TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
    watchdog = Watchdog(Rendezvous(store, 0, 1, 0, 1), stall_seconds=1.0, num_steps=9, exit=Exits().hang)
    try:
        for step in range(1, 6):
            now += 0.4
            watchdog.at("training", step)
            beat = watchdog._beat
            while watchdog._beat < beat + 2:
                time.sleep(0.01)
        assert not read
        now += 0.6
        while not read:
            time.sleep(0.01)
    finally:
        watchdog.close()


def explain_only(explain: Callable[[], None], reason: str) -> None:
    """Stands in for the end of the process."""
    explain()


def failure_of(steps: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Failure:
    """What is reported of a run whose two ranks stand still, with so many steps done."""
    store = TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
    watchdogs = [Watchdog(Rendezvous(store, rank, 2, rank, 2), 3.0, num_steps=9, exit=explain_only) for rank in (0, 1)]
    for watchdog, step in zip(watchdogs, steps, strict=True):
        watchdog.at("training", step)
    deadline = time.monotonic() + 240
    while not (failure := read_failure(store, 0)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for watchdog in watchdogs:
        watchdog.close()
    return failure


def test_a_hang_names_the_rank_that_the_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = failure_of((4, 3), monkeypatch)
    assert (failure.rank, failure.kind, failure.waited_for) == (0, "hang", 1)
    assert failure.error.startswith("no progress for ") and "rank 1 (" in failure.error


def test_a_hang_names_no_rank_where_none_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = failure_of((3, 3), monkeypatch)
    assert (failure.kind, failure.waited_for) == ("hang", None)


def test_a_store_that_freezes_at_the_end_of_the_run_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`close` waits for the watchdog's thread, which waits for the store, whose process may be frozen."""
    ended, thaw = list[int](), threading.Event()

    def exit(explain: Callable[[], None], reason: str) -> None:
        explain()
        ended.append(1)

    store = TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
    watchdog = Watchdog(Rendezvous(store, 0, 1, 0, 1), stall_seconds=0.2, num_steps=9, exit=exit)
    frozen = threading.Event()

    def publish() -> None:
        frozen.set()
        thaw.wait()

    monkeypatch.setattr(watchdog, "_publish", publish)
    frozen.wait()
    watchdog.close()
    assert ended == [1] and "the rendezvous store has not answered for" in capsys.readouterr().err
    thaw.set()
