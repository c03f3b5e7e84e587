"""A watch on the run: when no rank gets on, the one that the others wait for is named, and the job ends.

Every rank has a thread that tells how far it is, over a connection to the store of its own. The first whose own run
has stood still for too long looks at all of them and speaks; the others hear it, and all end.
"""

import json
import os
import socket
import sys
import threading
import time
from typing import Any

from megabench.runtime.messages import FailureKind, explain
from megabench.runtime.rendezvous import Rendezvous, reconnect
from megabench.train.pulse import Pulse, accuse, stand, suspects

BEFORE_FIRST_STEP = 4.0  # compilation, connections, checkpoints: patience, in units of that with a step
SLOWEST_STEP = 5.0  # a step may take so many times as long as the slowest before it


class Watch:
    """Tells how far this rank is, and ends its process when the run stands still. `at` says that it does not."""

    def __init__(self, rendezvous: Rendezvous, stall_seconds: float, num_steps: int) -> None:
        self._rank, self._world_size = rendezvous.rank, rendezvous.world_size
        self._store = reconnect(rendezvous.store)
        self._stall_seconds, self._num_steps = stall_seconds, num_steps
        self._interval = min(5.0, stall_seconds / 10)
        self._main_thread = threading.get_ident()
        self._moved, self._activity, self._step = time.monotonic(), "starting", 0
        self._slowest_step = 0.0
        self._beat = 0
        self._closed = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def at(self, activity: str, step: int) -> None:
        """This rank gets on: it begins `activity`, with `step` steps done."""
        now = time.monotonic()
        if activity == self._activity == "training":
            self._slowest_step = max(self._slowest_step, now - self._moved)
        self._moved, self._activity, self._step = now, activity, step

    def gets_on(self) -> None:
        """This rank gets on with what it does."""
        self._moved = time.monotonic()

    def close(self) -> None:
        """Ends the watch: from here on ranks leave one by one."""
        self._closed.set()
        self._thread.join()

    @property
    def patience(self) -> float:
        """How many seconds this rank may stand still."""
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
                if time.monotonic() - self._moved > self.patience and self._store.add("watch/claims", 1) == 1:
                    self._store.set("watch/verdict", json.dumps(self._verdict()))
        except Exception as error:
            if not self._closed.is_set():
                self._end("failed", f"rank {self._rank} ({socket.gethostname()}) lost the rendezvous store: {error}")

    def _publish(self) -> None:
        self._beat += 1
        place, waits = stand(self._main_thread)
        pulse = Pulse(self._rank, socket.gethostname(), self._beat, self._step, self._activity, place, waits)
        self._store.set(f"watch/{self._rank}", pulse.to_json())

    def _verdict(self) -> dict[str, Any]:
        """Why the job ends, as a sentence, and the rank that the others wait for, where it is a single one."""
        seconds = time.monotonic() - self._moved
        before = self._look()
        deadline = time.monotonic() + 2.5 * self._interval
        while time.monotonic() < deadline:  # a rank that hears nothing of this one would call it silent
            time.sleep(self._interval / 2)
            self._publish()
        now = self._look()
        silent = {rank for rank in now if rank in before and now[rank].beat == before[rank].beat}
        pulses = [now[rank] for rank in sorted(now)]
        accusation, blamed = accuse(pulses, silent, self._num_steps), suspects(pulses, silent)
        error = f"no progress for {seconds:.0f} s: {accusation} (stall_seconds={self._stall_seconds:g})"
        return {"error": error, "waited_for": min(blamed) if len(blamed) == 1 else None}

    def _look(self) -> dict[int, Pulse]:
        """The last pulses of all ranks; one that never had any is left out."""
        keys = {rank: f"watch/{rank}" for rank in range(self._world_size)}
        return {rank: Pulse.from_json(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _end(self, kind: FailureKind, sentence: str, waited_for: int | None = None) -> None:
        """Ends this process at once: its main thread may never come back."""
        try:
            explain(self._store, self._rank, kind, sentence, waited_for)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
