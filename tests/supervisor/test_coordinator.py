"""The tie between supervisors: two of them on one store, in one process."""

from collections.abc import Callable

import pytest
from torch.distributed import DistNetworkError, TCPStore

from megabench.supervisor import coordinator
from megabench.supervisor.coordinator import Coordinator, StudyStopped
from megabench.supervisor.launch import Launch


@pytest.fixture
def pair(monkeypatch) -> tuple[Coordinator, Coordinator]:
    """The lead and another, who look at each other at every breath."""
    monkeypatch.setattr(coordinator, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(coordinator, "BEAT_SECONDS", 0.0)
    store = TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
    lead, other = (
        Coordinator(Launch(store, "127.0.0.1", store.port, "study/0", (rank,), 0, 2, (0, 1)), []) for rank in (0, 1)
    )
    return lead, other


def raising(error: Exception) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


@pytest.mark.parametrize("number", [0, 1])
def test_what_goes_wrong_with_one_stops_the_other(pair, number):
    with pytest.raises(ValueError, match="of this one"):
        pair[number].to_the_end(raising(ValueError("of this one")))
    with pytest.raises(StudyStopped, match=rf"the supervisor of rank {number} failed: ValueError\('of this one'\)"):
        pair[1 - number].wait_until(lambda: False)


def test_a_store_that_is_gone_is_told_in_a_sentence(pair):
    with pytest.raises(StudyStopped, match=r"the store at 127.0.0.1:\d+ is unreachable"):
        pair[1].to_the_end(raising(DistNetworkError("recvValue failed")))


def test_one_that_does_not_join_stops_the_other(pair, monkeypatch):
    lead, other = pair
    monkeypatch.setattr(coordinator, "JOIN_SECONDS", 0.1)
    lead.report({})
    for one, wait in ((lead, lead.reports), (other, lambda: other.announced("plan"))):
        with pytest.raises(StudyStopped, match="the supervisor of rank 1 did not join within") as stopped:
            one.to_the_end(wait)
        assert stopped.value.rank == 1
