"""What ranks tell each other over the store."""

import json
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megabench.runtime import messages


def test_progress_and_failures_arrive() -> None:
    store = HashStore()
    assert messages.read_progress(store, 0) is None and messages.read_failure(store, 0) is None
    messages.report_progress(store, 0, messages.Progress("training", 3, 10))
    assert messages.read_progress(store, 0) == messages.Progress("training", 3, 10)
    messages.report_failure(store, 1, "oom", "no memory")
    messages.report_failure(store, 0, "failed", "lost rank 1")
    first, second = messages.read_failure(store, 1), messages.read_failure(store, 0)
    assert first is not None and second is not None
    assert (first.order, first.kind, second.order) == (1, "oom", 2)


def test_no_key_is_used_twice() -> None:
    """A rank that waits for the second message of a key would take the first one for it."""
    store = HashStore()
    messages.publish(store, "save/1", "first")
    with pytest.raises(RuntimeError, match="the store already contains the message save/1"):
        messages.publish(store, "save/1", "second")
    assert store.get("save/1") == b"first"
    assert messages.shared(store, 0, "steps", lambda: [1]) == [1]
    with pytest.raises(RuntimeError, match="the message steps"):
        messages.shared(store, 0, "steps", lambda: [2])


def test_a_sentence_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    messages.print_once(store, "Error: too few GPUs")
    messages.print_once(store, "Error: too few GPUs")
    assert capsys.readouterr().err == "Error: too few GPUs\n"


def test_an_end_is_explained_to_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    store = HashStore()
    for rank in range(2):
        messages.explain(store, rank, "invalid", "too few GPUs")
    assert capsys.readouterr().err == "Error: too few GPUs\n"
    failure = messages.read_failure(store, 1)
    assert failure is not None and (failure.kind, failure.error) == ("invalid", "too few GPUs")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "too few GPUs"


def test_an_end_is_explained_without_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    class OutOfReach(HashStore):
        def add(self, key: str, value: int) -> int:
            raise ConnectionError(f"{key} {value}")

    for store in (None, OutOfReach()):
        messages.explain(store, 0, "failed", "lost rank 1")
    assert capsys.readouterr().err == 2 * "Error: lost rank 1\n"


def test_disagreement_is_seen() -> None:
    store = HashStore()
    assert messages.disagreement(store, 0, "data", "abc") is None
    assert messages.disagreement(store, 1, "data", "abc") is None
    assert messages.disagreement(store, 2, "data", "xyz") == "abc"


def test_rank_0_outlasts_the_others() -> None:
    store, order = HashStore(), list[int]()

    def leave_last() -> None:
        messages.outlast(store, 0, 3, "test")
        order.append(0)

    host = threading.Thread(target=leave_last)
    host.start()
    for rank in (2, 1):
        time.sleep(3 * messages.POLL_SECONDS)
        order.append(rank)
        messages.outlast(store, rank, 3, "test")  # waits for nobody
    host.join()
    assert order == [2, 1, 0]


def test_rank_0_does_not_wait_for_a_rank_that_was_lost() -> None:
    began = time.monotonic()
    messages.outlast(HashStore(), 0, 2, "test", seconds=0.2)
    assert 0.2 <= time.monotonic() - began < 10, "less than the default"


def test_no_rank_waits_for_the_store_of_a_frozen_rank_0() -> None:
    thaw = threading.Event()

    class Frozen(HashStore):
        def add(self, key: str, value: int) -> int:
            thaw.wait()
            return value

    began = time.monotonic()
    messages.outlast(Frozen(), 1, 2, "test", seconds=0.2)
    assert time.monotonic() - began < 10
    thaw.set()
