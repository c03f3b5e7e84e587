"""What a rank tells the others about itself, and who is to blame when no one gets on."""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import PurePath
from types import FrameType

# where ranks stand that wait for others: in torch's collectives, or in a call that waits for the device
_WAITING_FILES = ("torch/distributed/", "torch/autograd/graph.py")
_WAITING_CALLS = ("synchronize", "update")


@dataclass(frozen=True)
class Pulse:
    """A sign of life: `step` steps are done, `activity` and `place` tell what the rank does now.

    `beat` counts the signs of life; `is_waiting` tells that the place is one where ranks wait for each other.
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
    def from_json(cls, text: str | bytes) -> "Pulse":
        return cls(**json.loads(text))


def stand(thread: int) -> tuple[str, bool]:
    """Where a thread stands, "all_reduce (distributed_c10d.py:2830) in update (engine.py:61)", and whether it waits."""
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return "nowhere", False
    ours: FrameType | None = innermost
    while ours is not None and "/megabench/" not in ours.f_code.co_filename:
        ours = ours.f_back
    code = innermost.f_code
    waits = any(part in code.co_filename for part in _WAITING_FILES) or code.co_name in _WAITING_CALLS
    place = _call(innermost)
    return (place if ours in (None, innermost) else f"{place} in {_call(ours)}"), waits


def _call(frame: FrameType | None) -> str:
    assert frame is not None
    return f"{frame.f_code.co_name} ({PurePath(frame.f_code.co_filename).name}:{frame.f_lineno})"


def suspects(pulses: list[Pulse], silent: set[int]) -> set[int]:
    """The ranks that the others wait for; all ranks if they cannot be told apart.

    `silent` are those that give no sign of life any more.
    """
    if silent:
        return silent
    behind = {pulse.rank for pulse in pulses if pulse.step < max(other.step for other in pulses)}
    blamed = behind or {pulse.rank for pulse in pulses if not pulse.is_waiting}
    usual, how_many = Counter(pulse.place for pulse in pulses).most_common(1)[0]
    if how_many > len(pulses) / 2 and not behind:
        blamed -= {pulse.rank for pulse in pulses if pulse.place == usual}
    return blamed or {pulse.rank for pulse in pulses}


def accuse(pulses: list[Pulse], silent: set[int], num_steps: int) -> str:
    """Describe the `suspects` in a clause."""
    blamed = suspects(pulses, silent)
    does = {pulse.rank: "gives no sign of life" if silent else f"stands in {pulse.place}" for pulse in pulses}
    named = [f"{_who(pulse)} {does[pulse.rank]}" for pulse in pulses if pulse.rank in blamed]
    others = ", and the others wait" if not silent and len(blamed) < len(pulses) else ""
    return f"{_list(named)} after step {_steps(pulses, blamed, num_steps)}{others}"


def _who(pulse: Pulse) -> str:
    return f"rank {pulse.rank} ({pulse.host})"


def _list(named: list[str]) -> str:
    more = f" and {len(named) - 4} more ranks" if len(named) > 4 else ""
    return ", ".join(named[:4]) + more


def _steps(pulses: list[Pulse], ranks: set[int], num_steps: int) -> str:
    return f"{min(pulse.step for pulse in pulses if pulse.rank in ranks)} of {num_steps}"
