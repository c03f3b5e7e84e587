"""Split the time of a profiled step into parts. Each instant belongs to one part, so the parts add up to the step.

Communication counts as exposed only while no compute kernel runs. An instant without any kernel is idle.
"""

import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP, UPDATE = "megabench step", "megabench update"  # profiler annotations of the whole step and of the optimizer

# Names of kernels (cuBLAS, CUTLASS, cuDNN, Triton) and of ATen operations on CPU that belong to a part of compute. If
# two parts run at the same instant, the instant belongs to the part that comes first in _COMPUTE.
_MATMUL = re.compile(r"gemm|nvjet|cutlass|cublas|xmma|aten::(addmm|mm|bmm|baddbmm|_?linear|matmul)", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
MATMUL, ATTENTION, OPTIMIZER, OTHER, COPIES = "matrix products", "attention", "optimizer", "other compute", "copies"
_COMPUTE = (ATTENTION, MATMUL, OPTIMIZER, OTHER, COPIES)
IDLE = "idle"
UNKNOWN_GROUP = "a group"  # gloo's events do not name the process group
# The kernels of copy engines between the GPUs of a tensor-parallel group: signals of torch's symmetric memory, and the
# exchange of scalars (engines/megatron/scalar_kernel.py). All copies on a stream that sends signals go to these GPUs.
_EXCHANGE, _SENDS_SIGNAL = re.compile(r"(put|wait)_signal|exchange_largest"), "put_signal"
_COPYING_AXIS = "tp"
_GROUP = "Process Group Name"  # the name of the profiler's field for the process group of an NCCL kernel


@dataclass(frozen=True)
class Split:
    """The step of one rank in seconds. `parts` add up to `step`; `communication` includes overlapped communication."""

    step: float
    parts: dict[str, float]
    communication: dict[str, float]

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of exposed communication, by parallel axes."""
        return {axes: self.parts.get(exposed(axes), 0.0) for axes in self.communication}


def exposed(axes: str) -> str:
    """Return the name of the part for exposed communication along `axes`."""
    return f"exposed {axes}"


def split(trace: Mapping[str, Any], axes_of: Callable[[Sequence[int]], str]) -> Split:
    """Split the step in `trace`, which is in Chrome's format and contains both annotations.

    `axes_of` returns the parallel axes along which the ranks of a group differ, e.g. "tp".
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
    """Yield the kernels of the GPU, or the operations of the CPU if there is no GPU, each with its part."""
    begin, end = _window(events, UPDATE)
    on_gpu = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    calls = _Calls(events)
    copying = {_stream(event) for event in on_gpu if _SENDS_SIGNAL in event["name"]}
    for event in on_gpu:
        arguments = event.get("args", {})
        launch = launches.get(arguments.get("correlation"), event)
        if event["name"].startswith("nccl"):
            yield event, _axes(arguments if _GROUP in arguments else calls.before(launch), names, axes_of)
        elif _EXCHANGE.search(event["name"]) or (event["cat"] == "gpu_memcpy" and _stream(event) in copying):
            yield event, _COPYING_AXIS
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
    """NCCL calls by thread.

    The calls name the process group of coalesced sends and receives, but their kernels do not.
    """

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self._by_thread: defaultdict[Any, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
        for event in events:
            if _GROUP in event.get("args", {}) and event["cat"] == "cpu_op":
                self._by_thread[event.get("tid")].append((event["ts"], event["args"]))
        for calls in self._by_thread.values():
            calls.sort(key=lambda call: call[0])

    def before(self, launch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the last NCCL call before the kernel launch `launch` on the same thread."""
        calls = self._by_thread[launch.get("tid")]
        position = bisect(calls, launch["ts"], key=lambda call: call[0])
        return calls[position - 1][1] if position else {}


def _stream(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _compute(name: str) -> str:
    return ATTENTION if _ATTENTION.search(name) else MATMUL if _MATMUL.search(name) else OTHER


def _group_names(trace: Mapping[str, Any], axes_of: Callable[[Sequence[int]], str]) -> dict[str, str]:
    """Return the parallel axes of every process group, by torch's name of the group."""
    groups = trace.get("distributedInfo", {}).get("pg_config", [])
    return {str(group["pg_name"]): axes_of(group["ranks"]) for group in groups if len(group.get("ranks", ())) > 1}


def _axes(arguments: Mapping[str, Any], names: Mapping[str, str], axes_of: Callable[[Sequence[int]], str]) -> str:
    """Return the parallel axes of an NCCL kernel, by the name of its group or by the ranks in its arguments."""
    if axes := names.get(str(arguments.get(_GROUP))):
        return axes
    ranks = re.findall(r"\d+", str(arguments.get("Process Group Ranks", "")))
    return axes_of([int(rank) for rank in ranks]) if len(ranks) > 1 else UNKNOWN_GROUP


def _sweep(spans: Sequence[tuple[float, float, str]], order: Sequence[str]) -> defaultdict[str, float]:
    """Return the time of each part. Parts earlier in `order` take precedence while several run."""
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
