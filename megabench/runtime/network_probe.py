"""Measure what TCP connections between two network namespaces reach. Loads no torch."""

import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain

from megabench.runtime.namespace import call_in_namespace

_NUM_STREAMS = 2  # NCCL also opens several sockets per connection
_BLOCK = bytes(2**20)
_NUM_ROUND_TRIPS = 100
_ROUND_TRIP_SECONDS = 1.0  # for all of them
_FILL_SECONDS = 0.03
_FILL_ROUND_TRIPS = 20  # in which TCP reaches its speed
_WAIT_SECONDS = 10.0  # for a connection or a block; only a broken network takes as long

End = tuple[int, str]  # a namespace and the address in it


def measure_link(here: End, there: End, seconds: float) -> dict[str, float]:
    """Return GB/s (10^9 bytes per second) in both directions, one after the other, and the median round trip in µs.

    Each direction takes about `seconds`. Raises OSError if the ends cannot connect.
    """
    round_trip_us = _round_trip(here, there)
    fill = _FILL_SECONDS + _FILL_ROUND_TRIPS * round_trip_us * 1e-6
    return {
        "forth_gb_per_s": _bandwidth(here, there, seconds, fill),
        "back_gb_per_s": _bandwidth(there, here, seconds, fill),
        "round_trip_us": round_trip_us,
    }


@contextmanager
def _connected(here: End, there: End) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect two ends over TCP. Yield the socket here and the socket there."""
    with call_in_namespace(there[0], lambda: socket.create_server((there[1], 0))) as listener:
        address = listener.getsockname()
        near = call_in_namespace(here[0], lambda: socket.create_connection(address, _WAIT_SECONDS))
        far, _ = listener.accept()
    with near, far:
        for end in (near, far):
            end.settimeout(_WAIT_SECONDS)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield near, far


def _bandwidth(sender: End, receiver: End, seconds: float, fill: float) -> float:
    """Return the GB/s of several connections together.

    The token buckets and the sockets' buffers fill in the first `fill` seconds, which do not count.
    """
    arrivals: list[tuple[float, int]] = []

    def send(end: socket.socket) -> None:
        with suppress(OSError):  # the connection is shut down at the end
            while True:
                end.sendall(_BLOCK)

    def receive(end: socket.socket) -> None:
        buffer = bytearray(len(_BLOCK))
        with suppress(OSError):
            while num_bytes := end.recv_into(buffer):
                arrivals.append((time.perf_counter(), num_bytes))

    with ExitStack() as stack:
        pairs = [stack.enter_context(_connected(sender, receiver)) for _ in range(_NUM_STREAMS)]
        threads = [threading.Thread(target=send, args=(near,)) for near, _ in pairs]
        threads += [threading.Thread(target=receive, args=(far,)) for _, far in pairs]
        for thread in threads:
            thread.start()
        time.sleep(fill)
        started = time.perf_counter()
        time.sleep(seconds)
        for end in chain.from_iterable(pairs):
            end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    timed = [arrival for arrival in sorted(arrivals) if arrival[0] >= started]
    if len(timed) < 2:
        return 0.0
    return sum(num_bytes for _, num_bytes in timed[1:]) / (timed[-1][0] - timed[0][0]) / 1e9


def _round_trip(here: End, there: End) -> float:
    """Return the median round trip of one byte, in microseconds."""
    with _connected(here, there) as (near, far):

        def echo() -> None:
            while byte := far.recv(1):
                far.sendall(byte)

        thread = threading.Thread(target=echo)
        thread.start()
        seconds: list[float] = []
        while len(seconds) < _NUM_ROUND_TRIPS and sum(seconds) < _ROUND_TRIP_SECONDS:
            started = time.perf_counter()
            near.sendall(b"x")
            near.recv(1)
            seconds.append(time.perf_counter() - started)
        near.shutdown(socket.SHUT_WR)
        thread.join()
    return statistics.median(seconds) * 1e6
