"""Classify how a trial ended, and find the root cause from the ends of all ranks."""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megabench.record import FailureKind, RunFailure, Status
from megabench.runtime.messages import LOST_CONNECTION, Failure
from megabench.runtime.process import killer_hint, signal_title

# messages of NCCL and the operating system if shared memory is full
_NO_SHARED_MEMORY = re.compile(r"/dev/shm|shared memory segment")

_MOST_PLACES = 4


@dataclass(frozen=True)
class RankEnd:
    """How one rank of a trial ended.

    `code` is the exit status, which is negative for a signal. `was_ended` is true if the supervisor ended the rank.
    `order` numbers the failed exits. `last_line` is the last line of the rank's log. `place` is the function in which
    the rank was hanging.
    """

    rank: int
    host: str
    code: int
    was_ended: bool
    order: int | None = None
    last_line: str = ""
    place: str | None = None
    step: int = 0
    num_steps: int = 0
    failure: Failure | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def killed_by(self) -> int:
        """The signal that ended the rank, unless its supervisor sent it; 0 for none."""
        return -self.code if self.code < 0 and not self.was_ended else 0

    @property
    def last_words(self) -> str:
        """The error that the rank reported, or else the last line that it printed."""
        return self.failure.error if self.failure else self.last_line

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankEnd":
        fields: dict[str, Any] = json.loads(text)
        failure = fields.pop("failure")
        return cls(**fields, failure=Failure(**failure) if failure else None)


@dataclass(frozen=True)
class Verdict:
    """The status of a trial (ok, oom, failed or timeout) and its cause, as an error message and as fields."""

    status: Status
    error: str | None = None
    failure: RunFailure | None = None


def classify_failure(ends: Sequence[RankEnd], is_timeout: bool, timeout_seconds: float) -> Verdict:
    """Classify how a trial ended, from how its ranks ended."""
    suspects = [end for end in ends if end.failure or (end.code != 0 and not end.was_ended)]
    if cause := min(suspects, key=_suspicion, default=None):
        failure = _failure(cause)
        sentence = _explain(cause, several_hosts=len({end.host for end in ends}) > 1)
        return Verdict("oom" if failure.kind == "oom" else "failed", sentence, failure)
    if is_timeout:
        sentence = f"no result after {timeout_seconds:g} s (timeout_seconds): {_places(ends)}"
        # the culprit is the rank that has completed fewer steps than all other ranks, if there is one
        fewest = min(end.step for end in ends)
        behind = [end.rank for end in ends if end.step == fewest]
        return Verdict("timeout", sentence, RunFailure(kind="hang", rank=behind[0] if len(behind) == 1 else None))
    return Verdict("ok")


def _suspicion(end: RankEnd) -> tuple[int, bool, int]:
    """Return a sort key.

    The likeliest causes come first: a kill from outside, out of memory, an error of the rank itself, a lost connection.

    A lost peer makes the other ranks fail within a second, and their reports may arrive first.
    """
    is_hang = end.failure is not None and end.failure.kind == "hang"
    has_lost_peer = not is_hang and LOST_CONNECTION.search(end.last_words) is not None
    if end.killed_by not in (0, signal.SIGABRT) and not end.failure:
        likelihood = 0
    elif end.failure and end.failure.kind == "oom":
        likelihood = 1
    elif not has_lost_peer and (end.failure or end.killed_by != signal.SIGABRT):
        likelihood = 2
    else:
        likelihood = 3
    return likelihood, end.failure is None, (end.failure.order if end.failure else end.order) or 0


def _failure(end: RankEnd) -> RunFailure:
    """Describe the cause in fields, from how the most likely culprit ended."""
    told = end.failure
    if told and told.kind == "hang":
        return RunFailure(kind="hang", rank=told.waited_for)
    kind: FailureKind = "error"
    if told and told.kind == "oom":
        kind = "oom"
    elif (end.killed_by == signal.SIGBUS and not told) or _NO_SHARED_MEMORY.search(end.last_words):
        kind = "shared-memory"
    elif end.killed_by == signal.SIGKILL and not told:
        kind = "killed"
    return RunFailure(kind=kind, rank=end.rank)


def _explain(end: RankEnd, several_hosts: bool) -> str:
    who = f"rank {end.rank}" + (f" on {end.host}" if several_hosts else "")
    when = f" after step {end.step} of {end.num_steps}" if end.num_steps else ""
    if end.failure:
        if end.failure.kind == "oom":
            return f"{who} ran out of memory{when}: {end.failure.error}"
        return f"{who} failed{when}: {end.failure.error}"
    if end.code < 0:
        words = f": {end.last_line}" if -end.code == signal.SIGABRT and end.last_line else ""
        return f"{who} was killed by {signal_title(-end.code)}{when}{words}{killer_hint(-end.code)}"
    said = f"; its last words: {end.last_line}" if end.last_line else " and printed nothing"
    return f"{who} ended with exit status {end.code}{when}{said}"


def _places(ends: Sequence[RankEnd]) -> str:
    """Describe the functions in which the ranks of a hung trial are, with unusual ones first."""
    by_place: dict[str, list[RankEnd]] = {}
    for end in ends:
        silent = "ended" if not end.was_ended else "printed no stack when asked"
        by_place.setdefault(f"in {end.place}" if end.place else silent, []).append(end)
    ordered = sorted(by_place.items(), key=lambda item: (len(item[1]), item[1][0].rank))
    parts = [f"{_ranks(group)} {place}, {_steps(group)}" for place, group in ordered[:_MOST_PLACES]]
    if more := len(ordered) - _MOST_PLACES:
        parts += [f"{more} other places"] if more > 0 else []
    return "; ".join(parts)


def _ranks(ends: Sequence[RankEnd]) -> str:
    numbers = [end.rank for end in ends]
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"


def _steps(ends: Sequence[RankEnd]) -> str:
    steps = sorted({end.step for end in ends})
    num_steps = max(end.num_steps for end in ends)
    if not num_steps:
        return "before its first step" if len(ends) == 1 else "before their first step"
    done = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"
    return f"{done} of {num_steps} steps done"
