"""Messages between the ranks of a run and their supervisor, over the rendezvous store."""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from torch.distributed import DistError, Store

POLL_SECONDS = 0.05

FailureKind = Literal["invalid", "oom", "hang", "failed"]

# messages of torch, gloo, NCCL and the store on a rank that lost a failed peer
LOST_CONNECTION = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|ncclRemoteError|remote process exited|"
    r"socket (timeout|closed)|pair closure|DistNetworkError|failed to recv|recvValue failed|sendBytes failed|"
    r"watchdog|no error info|unhandled system error",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Progress:
    """The progress of a rank.

    The rank has finished `step` of `num_steps` steps, and `activity` describes its current work. `step_seconds` is the
    time of the last step, or None before the first step has ended.
    """

    activity: str
    step: int
    num_steps: int
    step_seconds: float | None = None

    def __str__(self) -> str:
        step = f", step {self.step}/{self.num_steps}" if self.step else ""
        seconds = "" if self.step_seconds is None else f", {self.step_seconds:.4g} s per step"
        return f"{self.activity}{step}{seconds}"


@dataclass(frozen=True)
class Failure:
    """Why a rank ends. `order` numbers the failure reports of the run from 1; `error` is one line.

    `waited_for` is the rank that the others waited for in a hang, if it is known.
    """

    rank: int
    kind: FailureKind
    error: str
    order: int
    waited_for: int | None = None


def publish(store: Store, key: str, value: str) -> None:
    """Set a key that no rank has set before.

    Raise RuntimeError if the key already has a value. A rank that waits for the new message would read the old one.
    """
    if store.check([key]):
        raise RuntimeError(f"the store already contains the message {key}")
    store.set(key, value)


def report_progress(store: Store, rank: int, progress: Progress) -> None:
    store.set(f"progress/{rank}", json.dumps(asdict(progress)))


def read_progress(store: Store, rank: int) -> Progress | None:
    key = f"progress/{rank}"
    return Progress(**json.loads(store.get(key))) if store.check([key]) else None


def report_failure(store: Store, rank: int, kind: FailureKind, error: str, waited_for: int | None = None) -> Failure:
    """Publish why this rank ends; the first report of the run has order 1."""
    failure = Failure(rank, kind, error, order=store.add("failures", 1), waited_for=waited_for)
    store.set(f"failure/{rank}", json.dumps(asdict(failure)))
    return failure


def tell_launcher(error: str, is_printed: bool = False) -> None:
    """Make torchrun's failure report show `error`. Other launchers ignore it.

    `is_printed` says that the user has read the message, so that `megabench train` does not print it again.

    Source of the format: torch.distributed.elastic.multiprocessing.errors.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time())), "is_printed": is_printed}
        told = {"message": {"message": error, "extraInfo": extra}}
        with contextlib.suppress(OSError):  # the printed message already contains the note
            Path(path).write_text(json.dumps(told))


def read_failure(store: Store, rank: int) -> Failure | None:
    key = f"failure/{rank}"
    return Failure(**json.loads(store.get(key))) if store.check([key]) else None


def disagreement(store: Store, rank: int, topic: str, value: str) -> str | None:
    """Return rank 0's `value` of `topic` if this rank has another value, else None.

    Every rank must call this function.
    """
    if rank == 0:
        publish(store, f"agreed/{topic}", value)
        return None
    theirs = store.get(f"agreed/{topic}").decode()
    return None if theirs == value else theirs


def shared(store: Store, rank: int, topic: str, find: Callable[[], Any]) -> Any:
    """Return on every rank what `find` returns on rank 0, converted to JSON and back.

    `topic` is a store key, unique to each call.

    Rank 0 decides what is in a directory, because other hosts may see new files of a shared file system late.
    """
    if rank == 0:
        publish(store, topic, json.dumps(find()))
    wait_for(store, [topic])
    return json.loads(store.get(topic))


def gathered(store: Store, rank: int, world_size: int, topic: str, value: Any) -> list[Any]:
    """Return the `value` of every rank, converted to JSON and back. Every rank must call this function.

    `topic` is a prefix of store keys, unique to each call.
    """
    publish(store, f"{topic}/{rank}", json.dumps(value))
    keys = [f"{topic}/{other}" for other in range(world_size)]
    wait_for(store, keys)
    return [json.loads(store.get(key)) for key in keys]


def wait_for(store: Store, keys: list[str]) -> None:
    """Wait until all `keys` exist, without the time limit of the store's own wait."""
    while not store.check(keys):
        time.sleep(POLL_SECONDS)


def meet(store: Store, rank: int, world_size: int, topic: str) -> None:
    """Wait for all ranks: a barrier that needs no process group."""
    publish(store, f"met/{topic}/{rank}", "here")
    if rank == 0:
        wait_for(store, [f"met/{topic}/{other}" for other in range(world_size)])
        publish(store, f"met/{topic}/all", "yes")
    wait_for(store, [f"met/{topic}/all"])


def outlast(store: Store, rank: int, world_size: int, topic: str, seconds: float = 10.0) -> None:
    """Block rank 0, whose process may host the store, until all ranks have called this function.

    Other ranks return when the store has counted them. Every rank returns after at most `seconds`, because a lost rank
    never calls this function, and the store of a frozen rank 0 never answers.
    """
    deadline = time.monotonic() + seconds

    def count(one: int) -> int:
        return store.add(f"outlasted/{topic}", one)

    def count_this_rank() -> None:
        with contextlib.suppress(DistError):  # rank 0 has ended, and with it the store
            count(1)

    if rank != 0:
        counting = threading.Thread(target=count_this_rank, daemon=True)
        counting.start()
        counting.join(seconds)
        return
    num_here = count(1)
    while num_here < world_size and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        num_here = count(0)


def await_all(store: Store, world_size: int, topic: str, timeout: timedelta) -> None:
    """Wait until all ranks have called this function with this `topic`. Raises DistError after `timeout`.

    A launcher sends SIGTERM to the other ranks as soon as one has exited.
    """
    key = f"awaited/{topic}"
    if store.add(f"{key}/count", 1) == world_size:
        store.set(key, "all")
    store.wait([key], timeout)


def print_once(store: Store, text: str) -> None:
    """Print `text` to stderr on the first rank that calls this function.

    Other ranks return after the text is printed, because launchers kill all ranks when the first one exits.
    """
    if store.add("printed/claims", 1) == 1:
        print(text, file=sys.stderr, flush=True)
        store.set("printed/done", "yes")
    else:
        store.wait(["printed/done"], timedelta(seconds=10))


def explain(store: Store | None, rank: int, kind: FailureKind, error: str, waited_for: int | None = None) -> None:
    """Report to the launcher and the supervisor why this rank ends, and print the reason once for all ranks.

    Every rank prints the reason if the rendezvous store cannot be reached, so that the reason is never lost.
    """
    tell_launcher(error, is_printed=True)
    text = f"Error: {error}"
    if store is not None:
        with contextlib.suppress(Exception):
            report_failure(store, rank, kind, error, waited_for)
            print_once(store, text)
            return
    print(text, file=sys.stderr, flush=True)
