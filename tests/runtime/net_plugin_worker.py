"""A process that drives the net plugin without NCCL: python -m tests.runtime.net_plugin_worker JSON.

The processes of a test exchange handles through files in a folder. Each has one connection to the next rank, and one
from the rank before it, as in NCCL's rings.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from megabench.runtime.net_plugin import NetPlugin

SIZES = (0, 1, 2, 7, 4096, 131_071, 131_072, 131_073, 2**20, 2**24, 2**26)
WAIT_SECONDS = 60.0  # only a lost message takes as long


class Ring:
    """The connections of rank `rank` of `size` ranks."""

    def __init__(self, library: str, folder: str, rank: int, size: int) -> None:
        self.plugin, self.rank, self.size = NetPlugin(Path(library)), rank, size
        handle, self.listener = self.plugin.listen()
        mine = Path(folder, f"handle-{rank}")
        mine.with_suffix(".new").write_bytes(handle)
        mine.with_suffix(".new").rename(mine)
        following = Path(folder, f"handle-{(rank + 1) % size}")
        wait(following.exists)
        self.sender = wait(lambda: self.plugin.connect(following.read_bytes()))
        self.receiver = wait(lambda: self.plugin.accept(self.listener))

    def send(self, array, tag=0, spins=False):
        return wait(lambda: self.plugin.send(self.sender, array.ctypes.data, array.nbytes, tag), spins)

    def receive(self, array, tag=0, spins=False):
        return wait(lambda: self.plugin.receive(self.receiver, array.ctypes.data, array.nbytes, tag), spins)

    def finish(self, request, spins=False):
        """Wait for a request, and return its number of bytes."""
        return wait(lambda: (size := self.plugin.test(request)) is not None and (size,), spins)[0]

    def exchange(self, sent, received):
        requests = self.receive(received), self.send(sent)
        assert [self.finish(request) for request in requests] == [received.nbytes, sent.nbytes]

    def close(self):
        self.plugin.close(sender=self.sender, receiver=self.receiver, listener=self.listener)


def wait(call, spins=False):
    """Call until the result is true, and return it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (result := call()):
        assert time.monotonic() < deadline, "a message was lost"
        if spins:
            os.sched_yield()
        else:
            time.sleep(1e-5)
    return result


def all_reduce(ring: Ring, data) -> None:
    """Sum `data` over all ranks, with a ring reduce-scatter and a ring all-gather. Bytes overflow."""
    parts = np.array_split(data, ring.size)
    for step in range(2 * (ring.size - 1)):
        sent, received = parts[(ring.rank - step) % ring.size], parts[(ring.rank - step - 1) % ring.size]
        buffer = np.full_like(received, 0xA5)
        ring.exchange(sent, buffer)
        received[:] = received + buffer if step < ring.size - 1 else buffer


def all_reduces(ring: Ring, count: int, seed: int, largest: int, corrupts_at: int | None = None) -> None:
    """Run all-reduces of drawn sizes and check every byte. Rank 0 changes one byte of a result at `corrupts_at`."""
    draw = np.random.default_rng(seed)  # the same draws on every rank
    for number in range(count):
        size = int(2 ** draw.uniform(0, 17)) - 1
        if number < 30:
            size = int(draw.choice([size for size in SIZES if size <= largest]))
        inputs = [draw.integers(0, 256, size, dtype=np.uint8) for _ in range(ring.size)]
        data = inputs[ring.rank].copy()
        all_reduce(ring, data)
        if number == corrupts_at and ring.rank == 0:
            data[-1] ^= 1
        expected = np.sum(inputs, axis=0, dtype=np.uint8)
        if not np.array_equal(data, expected):
            sys.exit(f"all-reduce {number} of {size} bytes: {np.count_nonzero(data != expected)} wrong bytes")


def messages(ring: Ring, count: int, seed: int) -> None:
    """Send messages of drawn sizes and tags from rank 0 to rank 1, which posts the receives in another order."""
    draw = np.random.default_rng(seed)
    for first in range(0, count, 24):
        tags = draw.integers(0, 5, 24)
        sizes = [int(2 ** draw.uniform(0, 19)) - 1 for _ in tags]
        contents = [draw.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        # messages with one tag arrive in the order in which they were sent
        orders = [by_tag(tags, draw.permutation(tags)) for _ in range(2)]
        if ring.rank == 0:
            requests = [ring.send(contents[index], int(tags[index])) for index in orders[0]]
            assert [ring.finish(request) for request in requests] == [sizes[index] for index in orders[0]]
        else:
            buffers = [np.zeros(size + 3, np.uint8) for size in sizes]
            posted = {index: ring.receive(buffers[index], int(tags[index])) for index in orders[1]}
            for index in draw.permutation(len(tags)):
                assert ring.finish(posted[index]) == sizes[index]
                if not np.array_equal(buffers[index][: sizes[index]], contents[index]) or buffers[index][-3:].any():
                    sys.exit(f"message {first + index} has wrong bytes")
        draw = np.random.default_rng((seed, first))


def by_tag(tags, wanted):
    """Return the indices of `tags` in an order whose tags are `wanted`. Indices with one tag ascend."""
    left = {tag: [index for index, own in enumerate(tags) if own == tag] for tag in set(tags)}
    return [left[tag].pop(0) for tag in wanted]


def times(ring: Ring, size_bytes: int, count: int) -> None:
    """Send `count` messages from rank 0 to rank 1, one at a time. Print their starts on rank 0 and ends on rank 1."""
    data, found = np.ones(size_bytes, np.uint8), []
    for _ in range(count):
        token = np.zeros(1, np.uint8)
        if ring.rank == 0:
            ring.finish(ring.receive(token))  # the receive of rank 1 is posted
            time.sleep(0.002)
            found.append(time.monotonic())
            ring.finish(ring.send(data, 1, spins=True), spins=True)
        else:
            request = ring.receive(data, 1)
            ring.finish(ring.send(token))
            ring.finish(request, spins=True)
            found.append(time.monotonic())
    print(json.dumps(found))


def stream(ring: Ring, size_bytes: int, count: int) -> None:
    """Send `count` messages to the next rank and receive as many, four at a time. Print the start and the end."""
    data, buffer = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    for _ in range(ring.size):  # a barrier
        ring.exchange(np.zeros(1, np.uint8), np.zeros(1, np.uint8))
    started, sends, receives = time.monotonic(), [], []
    for number in range(count + 4):
        if number < count:
            receives.append(ring.receive(buffer))
            sends.append(ring.send(data))
        if number >= 4:
            ring.finish(receives[number - 4])
            ring.finish(sends[number - 4])
    print(json.dumps([started, time.monotonic()]))


def endless(ring: Ring, folder: str, forks: bool = False) -> None:
    """Exchange large messages until the peer ends. Print what the plugin reported, and when.

    With `forks`, a child process keeps the sockets of this process open for ten seconds.
    """
    if forks and not os.fork():
        os.closerange(0, 3)
        time.sleep(10)
        os._exit(0)
    data, buffer = np.ones(2**26, np.uint8), np.zeros(2**26, np.uint8)
    Path(folder, f"running-{ring.rank}").touch()
    try:
        while True:
            ring.exchange(data, buffer)
    except ConnectionError as error:
        print(json.dumps([str(error), time.time()]))


def limits(ring: Ring) -> None:
    """Use one connection from this process to itself, up to its limits."""
    found = ring.plugin.properties()
    assert (found.name, found.pci_path, found.pointers, found.max_grouped_receives) == (b"emulated", None, 1, 1)
    assert (found.mbits_per_s, found.latency_us, found.device_type) == (200_000, 40.0, 0)
    buffer = np.zeros(8, np.uint8)
    requests = [ring.plugin.receive(ring.receiver, buffer.ctypes.data, 8, 5) for _ in range(33)]
    assert all(requests[:32]) and requests[32] is None, "NCCL has at most 32 requests"
    assert ring.plugin.send(ring.sender, buffer.ctypes.data, 8, 6) is None, "no receive has this tag"
    for request in requests[:32]:
        assert ring.plugin.test(request) is None
        sent = ring.send(np.full(4, 7, np.uint8), 5)
        assert (ring.finish(request), ring.finish(sent)) == (4, 4) and buffer.tolist() == [7] * 4 + [0] * 4
    ring.receive(buffer, 5)
    try:
        ring.send(np.zeros(9, np.uint8), 5)
    except ConnectionError as error:
        print(error)


TASKS = {task.__name__: task for task in (all_reduces, messages, times, stream, endless, limits)}


def main(given: str) -> None:
    options = json.loads(given)
    task = TASKS[options.pop("task")]
    ring = Ring(*(options.pop(name) for name in ("library", "rendezvous", "rank", "size")))
    task(ring, **options)
    ring.close()


if __name__ == "__main__":
    main(sys.argv[1])
