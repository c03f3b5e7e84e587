"""Find the functions in which processes hang, from the stacks that faulthandler prints into their logs on SIGUSR2."""

import re
import signal
import time
from collections.abc import Mapping
from pathlib import PurePath

from megabench.runtime.child import Child

STACK_SIGNAL = signal.SIGUSR2
DUMP_SECONDS = 1.0

_THREAD = re.compile(r"^(?:Current thread 0x|Thread 0x|Stack ).*most recent call first", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$', re.MULTILINE)


def ask_where(children: Mapping[int, Child]) -> dict[int, str]:
    """Make each child print its stack, and return its current function by rank. Ranks without output are omitted."""
    sizes = {rank: child.log.stat().st_size for rank, child in children.items()}
    for child in children.values():
        child.send(STACK_SIGNAL)
    time.sleep(DUMP_SECONDS)
    stands = {}
    for rank, child in children.items():
        with child.log.open("rb") as log:
            log.seek(sizes[rank])
            if place := where_it_stands(log.read().decode(errors="replace")):
                stands[rank] = place
    return stands


def where_it_stands(dump: str) -> str | None:
    """Return the innermost function of the main thread, and the innermost function of megabench; None without a stack.

    "all_reduce (distributed_c10d.py:2830) in train_step (engine.py:61)"
    """
    if not (threads := list(_THREAD.finditer(dump))):
        return None
    # faulthandler prints the newest thread first, so the main thread comes last
    frames = list(_FRAME.finditer(dump, threads[-1].end()))
    if not frames:
        return None
    ours = next((frame for frame in frames if "/megabench/" in frame["file"]), frames[0])
    return _call(frames[0]) if ours is frames[0] else f"{_call(frames[0])} in {_call(ours)}"


def _call(frame: re.Match[str]) -> str:
    return f"{frame['function']} ({PurePath(frame['file']).name}:{frame['line']})"
