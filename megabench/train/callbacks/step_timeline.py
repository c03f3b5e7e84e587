"""Where a step went, from torch.profiler's trace of it: every instant belongs to one part, so the parts add up.

Compute hides what runs beside it: communication counts as exposed only where nothing computes, and an instant in which
nothing runs at all is idle.
"""

import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP, UPDATE = "megabench step", "megabench update"  # annotations of the whole step and of the optimizer's part

# parts of compute, by the names of kernels (cuBLAS, CUTLASS, cuDNN, Triton) and of ATen's operations on CPU; an
# instant in which two of them run counts for the first
_MATMUL = re.compile(r"gemm|nvjet|cutlass|cublas|xmma|aten::(addmm|mm|bmm|baddbmm|_?linear|matmul)", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
MATMUL, ATTENTION, OPTIMIZER, OTHER, COPIES = "matrix products", "attention", "optimizer", "other compute", "copies"
_COMPUTE = (ATTENTION, MATMUL, OPTIMIZER, OTHER, COPIES)
IDLE = "idle"
UNKNOWN_GROUP = "a group"  # gloo does not say which
_GROUP = "Process Group Name"  # an argument of NCCL's kernels and calls


@dataclass(frozen=True)
class Split:
    """One rank's step in seconds: `parts` add up to `step`; `communication` is by axes, hidden or not."""

    step: float
    parts: dict[str, float]
    communication: dict[str, float]

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of communication during which nothing computed, by axes."""
        return {axes: self.parts.get(exposed(axes), 0.0) for axes in self.communication}


def exposed(axes: str) -> str:
    """The name of the part in which only communication along `axes` goes on."""
    return f"exposed {axes}"


def split(trace: Mapping[str, Any], axes_of: Callable[[Sequence[int]], str]) -> Split:
    """The parts of the step in `trace` (Chrome's format, with the annotations above).

    `axes_of` names the axes along which the ranks of a group differ, e.g. "tp".
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    begin, end = _window(events, STEP)
    spans = [
        (max(event["ts"], begin), min(event["ts"] + event["dur"], end), part)
        for event, part in _parts(events, _group_names(trace, axes_of), axes_of)
        if event["ts"] < end and event["ts"] + event["dur"] > begin
    ]
    axes = sorted({part for _, _, part in spans} - set(_COMPUTE))
    shares = _sweep(spans, [*_COMPUTE, *axes])
    parts = {part: shares[part] / 1e6 for part in _COMPUTE if shares[part]}
    parts |= {exposed(name): shares[name] / 1e6 for name in axes}
    step = (end - begin) / 1e6
    communication = {name: _sweep([s for s in spans if s[2] == name], [name])[name] / 1e6 for name in axes}
    return Split(step, parts | {IDLE: step - sum(parts.values())}, communication)


def _window(events: Sequence[dict[str, Any]], name: str) -> tuple[float, float]:
    event = next(event for event in events if event["name"] == name and event["cat"] == "user_annotation")
    return event["ts"], event["ts"] + event["dur"]


def _parts(
    events: Sequence[dict[str, Any]], names: Mapping[str, str], axes_of: Callable[[Sequence[int]], str]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Every event in which something was done, with the part it belongs to: of the GPU, or, without one, of the CPU."""
    begin, end = _window(events, UPDATE)
    on_gpu = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    calls = _Calls(events)
    for event in on_gpu:
        arguments = event.get("args", {})
        launch = launches.get(arguments.get("correlation"), event)
        if event["name"].startswith("nccl"):
            yield event, _axes(arguments if _GROUP in arguments else calls.before(launch), names, axes_of)
        elif begin <= launch["ts"] < end:
            yield event, OPTIMIZER
        else:
            yield event, COPIES if event["cat"] != "kernel" else _compute(event["name"])
    for event in events if not on_gpu else []:
        if event["name"].startswith("gloo:"):
            yield event, UNKNOWN_GROUP
        elif event["name"].startswith("aten::"):
            yield event, OPTIMIZER if begin <= event["ts"] < end else _compute(event["name"])


class _Calls:
    """The calls of NCCL by thread: sends and receives that are coalesced become one kernel, which names no group."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self._by_thread: defaultdict[Any, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
        for event in events:
            if _GROUP in event.get("args", {}) and event["cat"] == "cpu_op":
                self._by_thread[event.get("tid")].append((event["ts"], event["args"]))
        for calls in self._by_thread.values():
            calls.sort(key=lambda call: call[0])

    def before(self, launch: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the last call before `launch` on its thread."""
        calls = self._by_thread[launch.get("tid")]
        position = bisect(calls, launch["ts"], key=lambda call: call[0])
        return calls[position - 1][1] if position else {}


def _compute(name: str) -> str:
    return ATTENTION if _ATTENTION.search(name) else MATMUL if _MATMUL.search(name) else OTHER


def _group_names(trace: Mapping[str, Any], axes_of: Callable[[Sequence[int]], str]) -> dict[str, str]:
    """The axes of every process group, by torch's name of it."""
    groups = trace.get("distributedInfo", {}).get("pg_config", [])
    return {str(group["pg_name"]): axes_of(group["ranks"]) for group in groups if len(group.get("ranks", ())) > 1}


def _axes(arguments: Mapping[str, Any], names: Mapping[str, str], axes_of: Callable[[Sequence[int]], str]) -> str:
    """The axes of an NCCL kernel, by its group's name, or by its ranks where they are written out."""
    if axes := names.get(str(arguments.get(_GROUP))):
        return axes
    ranks = re.findall(r"\d+", str(arguments.get("Process Group Ranks", "")))
    return axes_of([int(rank) for rank in ranks]) if len(ranks) > 1 else UNKNOWN_GROUP


def _sweep(spans: Sequence[tuple[float, float, str]], order: Sequence[str]) -> defaultdict[str, float]:
    """How long each part was the first, in `order`, of those that went on."""
    borders = sorted(
        border for begin, end, part in spans if end > begin for border in ((begin, 1, part), (end, -1, part))
    )
    going_on: Counter[str] = Counter()
    shares: defaultdict[str, float] = defaultdict(float)
    before = 0.0
    for at, change, part in borders:
        first = next((name for name in order if going_on[name]), None)
        if first:
            shares[first] += at - before
        going_on[part] += change
        before = at
    return shares
