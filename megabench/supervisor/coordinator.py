"""Coordinate the supervisors of a study: agree on a plan, detect lost supervisors, and stop together."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from torch.distributed import DistError

from megabench.runtime.process import host_name
from megabench.runtime.signed_store import with_prefix
from megabench.supervisor.launch import Launch

POLL_SECONDS = 0.2
BEAT_SECONDS = 2.0
LOST_AFTER_SECONDS = 30.0
JOIN_SECONDS = 600.0
ANSWER_SECONDS = 300.0

Result = TypeVar("Result")


class StudyStopped(Exception):
    """The study cannot continue. `signal` is the signal that stopped this supervisor, or 0 for another reason.

    `rank` is the rank of the supervisor at fault, if there is one.
    """

    def __init__(self, reason: str, signal_number: int = 0, rank: int | None = None) -> None:
        super().__init__(reason)
        self.signal, self.rank = signal_number, rank


_NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that `note_signals` replaces."""
    handlers = {number: signal.getsignal(number) for number in _NOTED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def note_signals() -> list[int]:
    """Collect SIGINT, SIGTERM and SIGUSR1 (a scheduler's warning) in the returned list, to end children in order."""
    received: list[int] = []
    for number in _NOTED:
        signal.signal(number, lambda number, _: received.append(number))
    return received


class Coordinator:
    """The connection of this supervisor to the others. Every wait calls `poll`, which sends the heartbeat."""

    def __init__(self, launch: Launch, signals: list[int]) -> None:
        self.launch = launch
        self._signals = signals
        self._store = with_prefix(launch.store, f"{launch.root}/coordinator")
        self._num_beats = 0
        self._beaten = float("-inf")
        self._watched: dict[int, tuple[int, float]] = {}
        self._beat()

    def poll(self) -> None:
        """Wait briefly.

        Raises StudyStopped if this supervisor received a signal, or if another supervisor is lost or stops.
        """
        time.sleep(POLL_SECONDS)
        if self._signals:
            name = signal.Signals(self._signals[0]).name
            ranks = self.launch.ranks
            which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}"
            self.stop_all(f"the supervisor of {which} on {host_name()} was ended by {name}", self.launch.supervisor)
            raise StudyStopped(f"stopped by {name}", self._signals[0])
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            self._beat()
            if self._store.check(["stopped"]):
                told = json.loads(self._store.get("stopped"))
                raise StudyStopped(told["reason"], rank=told["rank"])
            self._watch()

    def wait_until(self, ready: Callable[[], bool], problem: str | None = None) -> None:
        """Poll until `ready`. With `problem`, raise StudyStopped with this reason after ANSWER_SECONDS.

        Without a time limit, the study would hang if another client of the store deleted its messages.
        """
        started = time.monotonic()
        while not ready():
            if problem and time.monotonic() - started > ANSWER_SECONDS:
                self.stop_all(problem, self.launch.supervisor)
                raise StudyStopped(problem)
            self.poll()

    def report(self, report: dict[str, Any]) -> None:
        """Send a report to the lead supervisor before the study starts."""
        report = {"host": host_name(), **report}
        self._store.set(f"report/{self.launch.supervisor}", json.dumps(report))

    def reports(self) -> list[dict[str, Any]]:
        """Wait for the reports of all supervisors. Called by the lead. Raises StudyStopped if a report is missing."""
        started = time.monotonic()
        for number in self.launch.supervisors:
            while not self._store.check([f"report/{number}"]):
                if time.monotonic() - started > JOIN_SECONDS:
                    reason = f"the supervisor of rank {number} did not join within {JOIN_SECONDS:.0f} s"
                    self.stop_all(reason, number)
                    raise StudyStopped(reason, rank=number)
                self.poll()
        reports = [json.loads(self._store.get(f"report/{number}")) for number in self.launch.supervisors]
        others = [number for number in self.launch.supervisors if number != self.launch.supervisor]
        self._watched = {number: (0, time.monotonic()) for number in others}
        return reports

    def announce(self, key: str, content: Any) -> None:
        """Publish `content` for all supervisors. Called by the lead."""
        self._store.set(f"announced/{key}", json.dumps(content))

    def announced(self, key: str) -> Any:
        """Wait for the announcement of the lead under `key`, and return it."""
        self.wait_until(lambda: self._store.check([f"announced/{key}"]))
        if not self.launch.is_lead:
            self._watched.setdefault(0, (0, time.monotonic()))
        return json.loads(self._store.get(f"announced/{key}"))

    def to_the_end(self, run: Callable[[], Result]) -> Result:
        """Call `run`, wait for all supervisors, and return its result.

        Raises StudyStopped if the study cannot continue. Any other exception stops the other supervisors.
        """
        try:
            result = run()
            self._part()
        except StudyStopped:
            raise
        except DistError:
            where = f"{self.launch.address}:{self.launch.port}"
            raise StudyStopped(
                f"the store at {where} is unreachable, so its process, the first supervisor, has ended"
            ) from None
        except Exception as error:
            with suppress(DistError):
                number = self.launch.supervisor
                self.stop_all(f"the supervisor of rank {number} failed: {error!r}", number)
            raise
        return result

    def _part(self) -> None:
        """Leave the study. The lead supervisor exits last, because its process may host the store."""
        if not self.launch.is_lead:
            self._store.set(f"parted/{self.launch.supervisor}", "yes")
            return
        others = [f"parted/{number}" for number in self.launch.supervisors[1:]]
        problem = f"not all supervisors have left the study within {ANSWER_SECONDS:.0f} s"
        self.wait_until(lambda: not others or self._store.check(others), problem)

    def stop_all(self, reason: str, rank: int) -> None:
        """Stop every supervisor for `reason`. `rank` is the supervisor at fault. The first reason counts."""
        self._store.compare_set("stopped", "", json.dumps({"reason": reason, "rank": rank}))

    def _beat(self) -> None:
        self._num_beats += 1
        self._beaten = time.monotonic()
        self._store.set(f"beat/{self.launch.supervisor}", str(self._num_beats))

    def _watch(self) -> None:
        """Check heartbeats: the lead checks all supervisors, and the others check the lead.

        Clocks of hosts are not compared.
        """
        now = time.monotonic()
        for number, (before, seen) in list(self._watched.items()):
            key = f"beat/{number}"
            beat = int(self._store.get(key)) if self._store.check([key]) else before
            if beat > before:  # a smaller number is an old heartbeat that another client has replayed
                self._watched[number] = (beat, now)
            elif now - seen > LOST_AFTER_SECONDS:
                silent = f"silent for {now - seen:.0f} s; its process or host is gone"
                reason = f"the supervisor of rank {number} has been {silent}"
                self.stop_all(reason, number)
                raise StudyStopped(reason, rank=number)
