"""Root causes from the ends of ranks, and places from the stacks of faulthandler."""

import faulthandler
import tempfile
import threading
from typing import Any

import pytest

from megabench.record import RunFailure
from megabench.runtime.messages import Failure
from megabench.supervisor.root_cause import RankEnd, Verdict, classify_failure
from megabench.supervisor.trial_process import where_it_stands

LOST = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:32400"


def end(rank: int, code: int = 0, host: str = "a", was_ended: bool = False, **more) -> RankEnd:
    return RankEnd(rank=rank, host=host, code=code, was_ended=was_ended, **more)


def failure(rank: int, order: int, error: str, kind="failed") -> Failure:
    return Failure(rank=rank, kind=kind, error=error, order=order)


def test_all_ranks_at_0_is_ok():
    assert classify_failure([end(0), end(1)], False, 60) == Verdict("ok", None, None)


@pytest.mark.parametrize(
    ("ends", "status", "words"),
    [
        pytest.param(
            [end(0, 1, order=1, failure=failure(0, 1, LOST)), end(1, -9, order=2)],
            "failed",
            "rank 1 was killed by signal 9 (SIGKILL); on Linux that is often the out-of-memory killer",
            id="a kill before the lost connection it caused",
        ),
        pytest.param(
            [end(0, 1, failure=failure(0, 1, LOST)), end(1, 1, failure=failure(1, 2, "CUDA out of memory", "oom"))],
            "oom",
            "rank 1 ran out of memory: CUDA out of memory",
            id="memory before a lost connection",
        ),
        pytest.param(
            [end(0, 1, failure=failure(0, 1, LOST)), end(1, 1, failure=failure(1, 2, "ValueError: x", "failed"))],
            "failed",
            "rank 1 failed: ValueError: x",
            id="an own failure before an earlier lost connection",
        ),
        pytest.param(
            [end(0, 1, failure=failure(0, 2, "ValueError: a")), end(1, 1, failure=failure(1, 1, "ValueError: b"))],
            "failed",
            "rank 1 failed: ValueError: b",
            id="the earlier of two failures",
        ),
        pytest.param(
            [end(0, -6, order=1, last_line="[rank0] Watchdog caught collective timeout"), end(1, 1, order=2)],
            "failed",
            "rank 1 ended with exit status 1 and printed nothing",
            id="an exit before the watchdog's abort",
        ),
        pytest.param(
            [end(0, -6, order=1, last_line="double free or corruption")],
            "failed",
            "rank 0 was killed by signal 6 (SIGABRT): double free or corruption",
            id="an abort alone",
        ),
        pytest.param(
            [end(0, -9, was_ended=True), end(1, -15, was_ended=True, failure=failure(1, 1, "ValueError: b"))],
            "failed",
            "rank 1 failed: ValueError: b",
            id="a rank that reported and did not leave",
        ),
        pytest.param(
            [end(0, 1, failure=failure(0, 1, LOST)), end(1, -15, was_ended=True)],
            "failed",
            f"rank 0 failed: {LOST}",
            id="nothing but a lost connection",
        ),
        pytest.param(
            [end(0, -15, was_ended=True), end(1, -9, host="b", order=1, step=3, num_steps=9)],
            "failed",
            "rank 1 on b was killed by signal 9 (SIGKILL) after step 3 of 9; "
            "on Linux that is often the out-of-memory killer",
            id="the host, where there are several, and the step",
        ),
        pytest.param(
            [end(0, 2, order=1, last_line="Error: no such file")],
            "failed",
            "rank 0 ended with exit status 2; its last words: Error: no such file",
            id="last words",
        ),
    ],
)
def test_the_cause_is_named(ends, status, words):
    verdict = classify_failure(ends, False, 60)
    assert (verdict.status, verdict.error) == (status, words)


SHM = "DistBackendError: Error while creating shared memory segment /dev/shm/nccl-x: No space left on device (28)"


@pytest.mark.parametrize(
    ("ends", "kind", "rank"),
    [
        ([end(0, 1, failure=failure(0, 1, LOST)), end(1, -9, order=2)], "killed", 1),
        ([end(0, -9, was_ended=True), end(1, -7, order=1)], "shared-memory", 1),
        ([end(0, 1, failure=failure(0, 1, SHM)), end(1, 1, failure=failure(1, 2, LOST))], "shared-memory", 0),
        ([end(0, -6, order=1, last_line=SHM)], "shared-memory", 0),
        ([end(0), end(1, 1, failure=failure(1, 1, "CUDA out of memory", "oom"))], "oom", 1),
        ([end(0), end(1, 1, failure=failure(1, 1, "ValueError: SIGKILL"))], "error", 1),
        ([end(0, -11, order=1)], "error", 0),
        (
            [end(rank, 1, failure=Failure(rank, "hang", "all wait", rank + 1, waited_for=2)) for rank in (0, 1)],
            "hang",
            2,
        ),
        ([end(0, 1, failure=Failure(0, "hang", "broken pipe", 1))], "hang", None),
    ],
)
def test_the_cause_is_in_fields(ends, kind, rank):
    assert classify_failure(ends, False, 60).failure == RunFailure(kind=kind, rank=rank)


@pytest.mark.parametrize(("steps", "rank"), [((3, 2, 3), 1), ((3, 3, 3), None), ((2, 2, 3), None), ((0,), 0)])
def test_a_timeout_names_the_only_rank_that_is_behind(steps, rank):
    ends = [end(number, -15, was_ended=True, step=step, num_steps=4) for number, step in enumerate(steps)]
    assert classify_failure(ends, True, 60).failure == RunFailure(kind="hang", rank=rank)


def test_a_timeout_names_the_odd_one_out_first():
    waiting: dict[str, Any] = {"was_ended": True, "num_steps": 20, "place": "all_reduce (distributed_c10d.py:2830)"}
    ends = [end(rank, -15, step=4 + rank % 2, **waiting) for rank in (0, 1, 3)]
    ends.insert(2, end(2, -15, was_ended=True, step=3, num_steps=20, place="sleep (faults.py:7)"))
    verdict = classify_failure(ends, True, 60)
    assert (verdict.status, verdict.error) == (
        "timeout",
        "no result after 60 s (timeout_seconds): rank 2 in sleep (faults.py:7), 3 of 20 steps done; "
        "ranks 0, 1, 3 in all_reduce (distributed_c10d.py:2830), 4–5 of 20 steps done",
    )


def test_a_timeout_without_stacks_says_so():
    ends = [end(0), end(1, -9, was_ended=True)]
    assert classify_failure(ends, True, 2.5).error == (
        "no result after 2.5 s (timeout_seconds): rank 0 ended, before its first step; "
        "rank 1 printed no stack when asked, before its first step"
    )


def test_ends_survive_the_store():
    one = end(1, -9, failure=failure(1, 1, "é", "oom"), place="f (x.py:1)")
    assert RankEnd.from_json(one.to_json()) == one


@pytest.mark.parametrize("all_threads", [True, False])
def test_the_place_is_where_the_main_thread_stands(all_threads):
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    with tempfile.TemporaryFile("w+") as dump:
        faulthandler.dump_traceback(dump, all_threads=all_threads)
        dump.seek(0)
        text = dump.read()
    release.set()
    thread.join()
    assert where_it_stands(text).startswith("test_the_place_is_where_the_main_thread_stands (test_root_cause.py:")


def test_the_place_names_our_call_too():
    dump = """noise
Stack (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 2830 in all_reduce
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/x/megabench/engines/megatron/engine.py", line 61 in train_step
  File "/x/megabench/train/loop.py", line 70 in train
"""
    assert where_it_stands(dump) == "all_reduce (distributed_c10d.py:2830) in train_step (engine.py:61)"
    assert where_it_stands("no stack") is None
