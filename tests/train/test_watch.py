"""The watch of a run that stands still, and what it tells of it."""

import time

import pytest
from torch.distributed import TCPStore

from megabench.runtime.messages import Failure, read_failure
from megabench.runtime.rendezvous import Rendezvous
from megabench.train.watch import Watch


def failure_of(steps: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Failure:
    """What is reported of a run whose two ranks stand still, with so many steps done."""
    monkeypatch.setattr("megabench.train.watch.os._exit", lambda status: None)
    store = TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
    watches = [Watch(Rendezvous(store, rank, 2, rank, 2), stall_seconds=0.3, num_steps=9) for rank in (0, 1)]
    for watch, step in zip(watches, steps, strict=True):
        watch.at("training", step)
    deadline = time.monotonic() + 20
    while not (failure := read_failure(store, 0)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for watch in watches:
        watch.close()
    return failure


def test_a_hang_names_the_rank_that_the_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = failure_of((4, 3), monkeypatch)
    assert (failure.rank, failure.kind, failure.waited_for) == (0, "hang", 1)
    assert failure.error.startswith("no progress for ") and "rank 1 (" in failure.error


def test_a_hang_names_no_rank_where_none_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = failure_of((3, 3), monkeypatch)
    assert (failure.kind, failure.waited_for) == ("hang", None)
