"""The watchdog ends a hanging job, and names the rank that the others wait for.

Each rank runs a thread that publishes a heartbeat over a connection of its own to the rendezvous store.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import PurePath
from types import FrameType
from typing import Any

from megabench.runtime.messages import FailureKind, explain
from megabench.runtime.process import host_name
from megabench.runtime.rendezvous import Rendezvous, reconnect

BEFORE_FIRST_STEP = 4.0  # multiple of stall_seconds for the first step, which may compile kernels
SLOWEST_STEP = 5.0  # a step may take up to this multiple of the slowest step so far

# functions in which a rank waits for others: torch's collectives, and calls that wait for the device
_WAITING_FILES = ("torch/distributed/", "torch/autograd/graph.py")
_WAITING_CALLS = ("synchronize", "update", "wait_for_ranks")


@dataclass(frozen=True)
class Heartbeat:
    """The heartbeat that a rank publishes.

    `beat` counts the rank's heartbeats and `step` its finished steps. `activity` is the current part of the run, and
    `place` the function that the main thread executes; `is_waiting` is true if that function waits for other ranks.
    """

    rank: int
    host: str
    beat: int
    step: int
    activity: str
    place: str
    is_waiting: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Heartbeat":
        return cls(**json.loads(text))


def place_of(thread: int) -> tuple[str, bool]:
    """Return the functions that a thread executes, and whether the thread waits for other ranks.

    Example: "all_reduce (distributed_c10d.py:2830) in update (engine.py:61)" names the innermost function, and the
    innermost function of megabench.
    """
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return "nowhere", False
    try:
        ours: FrameType | None = innermost
        while ours is not None and "/megabench/" not in ours.f_code.co_filename:
            ours = ours.f_back
        code = innermost.f_code
        waits = any(part in code.co_filename for part in _WAITING_FILES) or code.co_name in _WAITING_CALLS
        place = _call(innermost)
        return (place if ours in (None, innermost) else f"{place} in {_call(ours)}"), waits
    except AttributeError:  # the frames of a running thread can change while they are read
        return "an unknown function", False


def _call(frame: FrameType | None) -> str:
    assert frame is not None
    return f"{frame.f_code.co_name} ({PurePath(frame.f_code.co_filename).name}:{frame.f_lineno})"


def find_stragglers(heartbeats: list[Heartbeat], silent: set[int]) -> set[int]:
    """Return the ranks that the others wait for, or all ranks if no rank stands out.

    `silent` are the ranks whose heartbeat has stopped.
    """
    if silent:
        return silent
    behind = {heartbeat.rank for heartbeat in heartbeats if heartbeat.step < max(other.step for other in heartbeats)}
    stragglers = behind or {heartbeat.rank for heartbeat in heartbeats if not heartbeat.is_waiting}
    usual, how_many = Counter(heartbeat.place for heartbeat in heartbeats).most_common(1)[0]
    if how_many > len(heartbeats) / 2 and not behind:
        stragglers -= {heartbeat.rank for heartbeat in heartbeats if heartbeat.place == usual}
    return stragglers or {heartbeat.rank for heartbeat in heartbeats}


def describe_stragglers(heartbeats: list[Heartbeat], silent: set[int], num_steps: int) -> str:
    """Describe the ranks found by `find_stragglers` as part of an error message."""
    stragglers = find_stragglers(heartbeats, silent)
    does = {
        heartbeat.rank: "has stopped sending heartbeats" if silent else f"is in {heartbeat.place}"
        for heartbeat in heartbeats
    }
    named = [f"{_who(heartbeat)} {does[heartbeat.rank]}" for heartbeat in heartbeats if heartbeat.rank in stragglers]
    others = ", and the others wait" if not silent and len(stragglers) < len(heartbeats) else ""
    return f"{_list(named)} after step {_steps(heartbeats, stragglers, num_steps)}{others}"


def _who(heartbeat: Heartbeat) -> str:
    return f"rank {heartbeat.rank} ({heartbeat.host})"


def _list(named: list[str]) -> str:
    more = f" and {len(named) - 4} more ranks" if len(named) > 4 else ""
    return ", ".join(named[:4]) + more


def _steps(heartbeats: list[Heartbeat], ranks: set[int], num_steps: int) -> str:
    return f"{min(heartbeat.step for heartbeat in heartbeats if heartbeat.rank in ranks)} of {num_steps}"


class Watchdog:
    """Publishes this rank's heartbeat from a thread, and ends its process when the run hangs.

    The training loop calls `at` and `touch` to report progress. The first rank without progress for `patience` seconds
    reads all heartbeats, finds the ranks that the others wait for, and publishes a verdict. Every rank that reads the
    verdict exits.

    `exit` ends this process. Its arguments are a function that explains why to the other ranks, and the reason.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        stall_seconds: float,
        num_steps: int,
        exit: Callable[[Callable[[], None], str], object],
    ) -> None:
        self._rank, self._world_size = rendezvous.rank, rendezvous.world_size
        self._host = host_name()
        self._store = reconnect(rendezvous.store)
        self._stall_seconds, self._num_steps = stall_seconds, num_steps
        self._exit = exit
        self._interval = min(5.0, stall_seconds / 10)
        self._main_thread = threading.get_ident()
        self._moved, self._activity, self._step = time.monotonic(), "starting", 0
        self._slowest_step = 0.0
        self._beat = 0
        self._closed = threading.Event()
        self._publish()
        self._answered = time.monotonic()
        threading.Thread(target=self._watch_store, name="store-watchdog", daemon=True).start()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, activity: str, step: int) -> None:
        """Report that this rank begins `activity` and has finished `step` steps."""
        now = time.monotonic()
        if activity == self._activity == "training":
            self._slowest_step = max(self._slowest_step, now - self._moved)
        self._moved, self._activity, self._step = now, activity, step

    def touch(self) -> None:
        """Report progress in the current activity of this rank."""
        self._moved = time.monotonic()

    def close(self) -> None:
        """Stop the watchdog, because ranks now exit one by one. End this process if the store does not answer."""
        self._closed.set()
        self._thread.join(self.patience)
        if self._thread.is_alive():
            self._end("hang", self._no_answer(), has_store=False)

    @property
    def patience(self) -> float:
        """The number of seconds without progress after which this rank counts as hanging."""
        if self._activity != "training":
            return BEFORE_FIRST_STEP * self._stall_seconds
        return max(self._stall_seconds, SLOWEST_STEP * self._slowest_step)

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._interval):
                self._publish()
                if self._store.check(["watch/verdict"]):
                    verdict = json.loads(self._store.get("watch/verdict"))
                    self._end("hang", verdict["error"], verdict["waited_for"])
                self._answered = time.monotonic()
                silent_seconds = self._answered - self._moved
                # one rank judges; the others only if that rank has not, because the counter is not signed
                if silent_seconds > self.patience and (
                    self._store.add("watch/judges", 1) == 1 or silent_seconds > 1.5 * self.patience + 30
                ):
                    self._store.set("watch/verdict", json.dumps(self._verdict()))
        except Exception as error:
            if not self._closed.is_set():
                self._end("failed", f"rank {self._rank} ({self._host}) lost the rendezvous store: {error}")

    def _watch_store(self) -> None:
        """End this process if the store does not answer, for instance because its process is frozen.

        A call of a frozen store blocks the watchdog's own thread.
        """
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            if min(now - self._answered, now - self._moved) > self.patience + 2 * self._interval:
                self._end("hang", self._no_answer(), has_store=False)

    def _no_answer(self) -> str:
        seconds = time.monotonic() - self._answered
        return (
            f"rank {self._rank} ({self._host}) made no progress, and the rendezvous store has not answered for "
            f"{seconds:.0f} s"
        )

    def _publish(self) -> None:
        self._beat += 1
        # Only the place of a rank without progress is of interest. Reading the frames of a running thread is not safe.
        is_stuck = time.monotonic() - self._moved > self._stall_seconds / 2
        place, waits = place_of(self._main_thread) if is_stuck else (f"the middle of {self._activity}", False)
        heartbeat = Heartbeat(self._rank, self._host, self._beat, self._step, self._activity, place, waits)
        self._store.set(f"watch/{self._rank}", heartbeat.to_json())

    def _verdict(self) -> dict[str, Any]:
        """Return the reason why the job ends, and the rank that the others wait for if there is exactly one."""
        seconds = time.monotonic() - self._moved
        before = self._heartbeats()
        deadline = time.monotonic() + 2.5 * self._interval
        while time.monotonic() < deadline:  # without this, another rank would report that this rank's heartbeat stopped
            time.sleep(self._interval / 2)
            self._publish()
        now = self._heartbeats()
        silent = {rank for rank in now if rank in before and now[rank].beat == before[rank].beat}
        heartbeats = [now[rank] for rank in sorted(now)]
        description = describe_stragglers(heartbeats, silent, self._num_steps)
        stragglers = find_stragglers(heartbeats, silent)
        error = f"no progress for {seconds:.0f} s: {description} (stall_seconds={self._stall_seconds:g})"
        return {"error": error, "waited_for": min(stragglers) if len(stragglers) == 1 else None}

    def _heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank that has published one."""
        keys = {rank: f"watch/{rank}" for rank in range(self._world_size)}
        return {
            rank: Heartbeat.from_json(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])
        }

    def _end(self, kind: FailureKind, reason: str, waited_for: int | None = None, *, has_store: bool = True) -> None:
        """End this process at once, because its main thread may never return."""

        def explain_once() -> None:
            explain(self._store if has_store else None, self._rank, kind, reason, waited_for)
            self._closed.set()  # while the callbacks are closed, the other thread must not report a hang of the store

        self._exit(explain_once, reason)
