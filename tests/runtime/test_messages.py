"""What ranks tell each other over the store."""

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


def test_a_sentence_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    messages.print_once(store, "Error: too few GPUs")
    messages.print_once(store, "Error: too few GPUs")
    assert capsys.readouterr().err == "Error: too few GPUs\n"


def test_disagreement_is_seen() -> None:
    store = HashStore()
    assert messages.disagreement(store, 0, "data", "abc") is None
    assert messages.disagreement(store, 1, "data", "abc") is None
    assert messages.disagreement(store, 2, "data", "xyz") == "abc"
