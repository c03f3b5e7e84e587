"""How a trial ended, from how each of its ranks ended: the root cause, not the first message that came along."""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megabench.record import Status
from megabench.runtime.messages import Failure

# what a rank says when it was another that failed: gloo, NCCL and the store, in the words of torch
_LOST_CONNECTION = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|ncclRemoteError|remote process exited|"
    r"socket (timeout|closed)|pair closure|DistNetworkError|failed to recv|recvValue failed|sendBytes failed|"
    r"watchdog|no error info|unhandled system error",
    re.IGNORECASE,
)

_MOST_PLACES = 4


@dataclass(frozen=True)
class RankEnd:
    """How one rank of a trial ended.

    `code` is its exit status, negative for a signal; `was_ended` says that its supervisor ended it. `order` counts the
    exits that were failures; `last_line` is from its log; `place` is where it stood when it was asked.
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

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankEnd":
        fields: dict[str, Any] = json.loads(text)
        failure = fields.pop("failure")
        return cls(**fields, failure=Failure(**failure) if failure else None)


def judge(ends: Sequence[RankEnd], is_timeout: bool, timeout_seconds: float) -> tuple[Status, str | None]:
    """The status of a trial (ok, oom, failed or timeout) and, unless it is ok, one line that names the cause."""
    if cause := _root_cause(ends):
        return _explain(cause, several_hosts=len({end.host for end in ends}) > 1)
    if is_timeout:
        return "timeout", f"no result after {timeout_seconds:g} s (timeout_seconds): {_places(ends)}"
    return "ok", None


def _root_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    suspects = [end for end in ends if end.failure or (end.code != 0 and not end.was_ended)]
    return min(suspects, key=_suspicion, default=None)


def _suspicion(end: RankEnd) -> tuple[int, bool, int]:
    """Smaller is likelier the cause: a kill from outside, out of memory, the rank's own failure, a lost connection.

    A peer that vanished makes the others fail or abort within a second, and their reports may come first.
    """
    killed = -end.code if end.code < 0 and not end.was_ended else 0
    words = end.failure.error if end.failure else end.last_line
    if killed and killed != signal.SIGABRT and not end.failure:
        likelihood = 0
    elif end.failure and end.failure.kind == "oom":
        likelihood = 1
    elif not _LOST_CONNECTION.search(words) and (end.failure or killed != signal.SIGABRT):
        likelihood = 2
    else:
        likelihood = 3
    return likelihood, end.failure is None, (end.failure.order if end.failure else end.order) or 0


def _explain(end: RankEnd, several_hosts: bool) -> tuple[Status, str]:
    who = f"rank {end.rank}" + (f" on {end.host}" if several_hosts else "")
    when = f" after step {end.step} of {end.num_steps}" if end.num_steps else ""
    if end.failure:
        if end.failure.kind == "oom":
            return "oom", f"{who} ran out of memory{when}: {end.failure.error}"
        return "failed", f"{who} failed{when}: {end.failure.error}"
    if end.code < 0:
        name = _signal_name(-end.code)
        hint = "; on Linux that is often the out-of-memory killer" if name == "SIGKILL" else ""
        words = f": {end.last_line}" if name == "SIGABRT" and end.last_line else ""
        return "failed", f"{who} was killed by signal {-end.code} ({name}){when}{words}{hint}"
    said = f"; its last words: {end.last_line}" if end.last_line else " and printed nothing"
    return "failed", f"{who} ended with exit status {end.code}{when}{said}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else "a real-time signal"


def _places(ends: Sequence[RankEnd]) -> str:
    """Where the ranks of a hung trial stand, the odd ones out first."""
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
