"""A network over shared memory between the emulated hosts of one machine, for NCCL. Loads no torch.

NCCL loads a net plugin, which sends at a set rate and latency. Unlike EmulatedNetwork, it is not bound to the speed of
sockets, and needs no root. Everything else, such as the store, uses the machine's own network.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from megabench.record import LinkReached, Transport
from megabench.runtime import net_plugin
from megabench.runtime.emulated_network import EmulatedNetwork, EmulatedNetworkError
from megabench.runtime.net_plugin_probe import measure_link

_MEASURE_SECONDS = 0.5  # for all links together
_LEAST_SECONDS = 0.1  # for each direction of a link


class SharedMemoryNetwork:
    """The network between `num_hosts` hosts, for the time of a `with` block.

    All processes of a host together send and receive at most `gb_per_s` (10^9 bytes per second, each way), and their
    messages arrive `latency_us` microseconds later. Entering the block raises EmulatedNetworkError if the plugin cannot
    be built.
    """

    def __init__(self, num_hosts: int, gb_per_s: float, latency_us: int = 0) -> None:
        self.num_hosts, self.gb_per_s, self.latency_us = num_hosts, gb_per_s, latency_us
        self._library = Path()
        self._schedule = -1
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._library = net_plugin.build()
        except net_plugin.NetPluginError as error:
            raise EmulatedNetworkError(f"emulate_network: {error}") from None
        self._schedule = os.memfd_create("schedule")  # without a name, so that nothing remains of a killed process
        self._stack.callback(os.close, self._schedule)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def namespace(self, host: int) -> None:
        """Return None: the processes of all hosts stay in the network namespace of the machine."""

    def variables(self, host: int) -> dict[str, str]:
        """Return the environment variables of the processes of `host`."""
        schedule = f"/proc/{os.getpid()}/fd/{self._schedule}"
        plugin = {"NCCL_NET_PLUGIN": str(self._library), "NCCL_NET": net_plugin.NAME}
        return plugin | net_plugin.variables(host, self.gb_per_s, self.latency_us, schedule)

    def measure(self) -> list[LinkReached]:
        """Measure the bandwidth each way, and the round trip, between host 0 and every other host, without NCCL.

        Raises OSError if processes cannot use the plugin.
        """
        seconds = max(_LEAST_SECONDS, _MEASURE_SECONDS / (2 * (self.num_hosts - 1)))
        return [
            LinkReached(
                hosts=(0, host),
                **measure_link(self._library, self.variables(0), self.variables(host), self.gb_per_s, seconds),
            )
            for host in range(1, self.num_hosts)
        ]


Network = EmulatedNetwork | SharedMemoryNetwork


def create_network(
    transport: Transport, num_hosts: int, gb_per_s: float, latency_us: int, store_port: int | None = None
) -> Network:
    """Return the network over a transport. The store at `store_port` of 127.0.0.1 stays in reach of all hosts."""
    if transport == "shared_memory":
        return SharedMemoryNetwork(num_hosts, gb_per_s, latency_us)
    return EmulatedNetwork(num_hosts, gb_per_s, latency_us, store_port)
