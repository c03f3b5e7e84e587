"""Measure what the net plugin reaches between two emulated hosts, with one process per host. Loads no torch."""

import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from megabench.runtime.net_plugin import NetPlugin

_MESSAGE_BYTES = 2**21
_NUM_OUTSTANDING = 4  # per connection
_GB_PER_S_PER_CONNECTION = 4  # NCCL also opens several connections, because one thread copies too slowly
_PAUSE_SECONDS = 1e-5
_NUM_ROUND_TRIPS = 100
_FIRST, _SECOND = "first", "second"
_WAIT_SECONDS = 30.0  # for a measurement; only a broken network takes as long


def measure_link(
    library: Path, here: Mapping[str, str], there: Mapping[str, str], gb_per_s: float, seconds: float
) -> dict[str, float]:
    """Return GB/s (10^9 bytes per second) in both directions, one after the other, and the median round trip in µs.

    `here` and `there` are the environment variables of the hosts. Each direction takes about `seconds` at `gb_per_s`.
    Raises OSError if the hosts cannot connect.
    """
    num_connections = math.ceil(gb_per_s / _GB_PER_S_PER_CONNECTION)
    num_messages = max(2, math.ceil(gb_per_s * 1e9 * seconds / _MESSAGE_BYTES / num_connections)) * num_connections
    words = [str(library), str(num_connections), str(num_messages)]
    ends = [_start([_FIRST, *words], here), _start([_SECOND, *words], there)]
    try:
        handles = [end.stdout.readline() for end in ends if end.stdout]
        for end, peer in zip(ends, reversed(handles), strict=True):
            if end.stdin:
                end.stdin.write(peer)
                end.stdin.flush()
        outputs = [end.communicate(timeout=_WAIT_SECONDS) for end in ends]
    except (BrokenPipeError, subprocess.TimeoutExpired) as error:
        raise OSError(f"the shared-memory network could not be measured: {error}") from None
    finally:
        for end in ends:
            end.kill()
            end.wait()
    for end, (_, errors) in zip(ends, outputs, strict=True):
        if end.returncode:
            raise OSError(
                f"the shared-memory network could not be measured: {(errors.splitlines() or ['no output'])[-1]}"
            )
    found: dict[str, float] = {}
    for output, _ in outputs:
        found |= json.loads(output)
    return found


def _start(words: list[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", __spec__.name, *words], subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=dict(os.environ) | dict(variables)
    )


def main(role: str, library: str, num_connections: int, num_messages: int) -> None:
    """Measure as one of two ends. Exchange handles over stdin and stdout, then print the results as JSON."""
    plugin = NetPlugin(Path(library))
    listeners = [plugin.listen() for _ in range(num_connections)]
    print(json.dumps([handle.hex() for handle, _ in listeners]), flush=True)
    peers = [bytes.fromhex(handle) for handle in json.loads(sys.stdin.readline())]
    senders = [_until(partial(plugin.connect, handle)) for handle in peers]
    receivers = [_until(partial(plugin.accept, listener)) for _, listener in listeners]
    memory = ctypes.create_string_buffer(b"x" * _MESSAGE_BYTES, _MESSAGE_BYTES)
    buffer = ctypes.addressof(memory)

    def send(connection: int, size: int = _MESSAGE_BYTES) -> int | None:
        return plugin.send(senders[connection], buffer, size)

    def receive(connection: int, size: int = _MESSAGE_BYTES) -> int | None:
        return plugin.receive(receivers[connection], buffer, size)

    def one_byte(start: Callable[[int, int], int | None]) -> None:
        request = _until(lambda: start(0, 1))
        _until(lambda: plugin.test(request))

    trips = []
    for _ in range(_NUM_ROUND_TRIPS):
        started = time.perf_counter()
        for start in (send, receive) if role == _FIRST else (receive, send):
            one_byte(start)
        trips.append(time.perf_counter() - started)
    found = {"round_trip_us": statistics.median(trips) * 1e6} if role == _FIRST else {}
    for sender, direction in ((_FIRST, "forth"), (_SECOND, "back")):
        arrivals = _transfer(plugin, send if role == sender else receive, num_connections, num_messages)
        if role != sender:
            num_bytes = (len(arrivals) - 1) * _MESSAGE_BYTES
            found[f"{direction}_gb_per_s"] = num_bytes / (arrivals[-1] - arrivals[0]) / 1e9
    print(json.dumps(found))


def _transfer(
    plugin: NetPlugin, start: Callable[[int], int | None], num_connections: int, num_messages: int
) -> list[float]:
    """Send or receive messages over all connections in turn, several at a time. Return when each was complete."""
    running: list[int] = []
    ends: list[float] = []
    num_started = 0
    while len(ends) < num_messages:
        if num_started < num_messages and len(running) < _NUM_OUTSTANDING * num_connections:
            request = start(num_started % num_connections)
            if request is not None:
                running.append(request)
                num_started += 1
                continue
        done = [request for request in running if plugin.test(request) is not None]
        ends += [time.perf_counter()] * len(done)
        running = [request for request in running if request not in done]
        if not done:
            time.sleep(_PAUSE_SECONDS)
    return ends


def _until(call: Callable[[], int | None]) -> int:
    """Call until the result is not None, and return it."""
    while (result := call()) is None:
        os.sched_yield()
    return result


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
