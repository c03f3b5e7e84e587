"""A network of limited bandwidth between the emulated hosts of one machine.

Each host is a network namespace with one virtual Ethernet interface (veth). A token bucket (tbf) at each end limits
what the host sends and what it receives. Two hosts are joined directly, and more than two by a bridge in another
namespace. No interface exists outside these namespaces, so no traffic leaves the machine, and the machine's own network
does not change. Needs root and the package pyroute2. Loads no torch.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from megabench.errors import UserError
from megabench.record import LinkReached
from megabench.runtime.namespace import call_in_namespace, create_namespace
from megabench.runtime.network_probe import measure_link
from megabench.runtime.store_relay import StoreRelay

if TYPE_CHECKING:
    from pyroute2 import IPRoute

INTERFACE = "emulated"
HOST_VARIABLE = "MEGABENCH_EMULATED_HOST"

# larger packets need less CPU time per byte, and their headers take less of the bandwidth
_MTU_BYTES = 65_535
_LARGEST_GB_PER_S = 4.29  # the kernel's message for token buckets has 32 bits for bytes per second
_BURST_SECONDS = 1e-3
_SMALLEST_BURST_BYTES = 2**18
_QUEUE_TIME = "50ms"
_BUCKET = 0x10000  # the handle 1: of a token bucket
_DELAYED_PACKETS = 10_000
_MEASURE_SECONDS = 0.5  # for all links together
_LEAST_SECONDS = 0.05  # for each direction of a link


class EmulatedNetworkError(UserError):
    """Raised if this machine cannot limit the network between emulated hosts."""


class EmulatedNetwork:
    """The network between `num_hosts` hosts, for the time of a `with` block.

    Each host sends and receives at most `gb_per_s` (10^9 bytes per second, each way), and its packets arrive
    `latency_us` microseconds later. With `store_port`, the hosts reach the store at this port of 127.0.0.1.

    Entering the block raises EmulatedNetworkError if this machine cannot create the network.
    """

    def __init__(self, num_hosts: int, gb_per_s: float, latency_us: int = 0, store_port: int | None = None) -> None:
        self.num_hosts, self.gb_per_s, self.latency_us = num_hosts, gb_per_s, latency_us
        self.namespaces: list[int] = []
        self._store_port = store_port
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._check()
        with ExitStack() as stack:
            self.namespaces = [_open_namespace(stack) for _ in range(self.num_hosts)]
            try:
                if self.num_hosts == 2:
                    _configure(self.namespaces[0], self._join_two)
                else:
                    _configure(_open_namespace(stack), self._join_by_bridge)
                for host, namespace in enumerate(self.namespaces):
                    _configure(namespace, partial(self._set_up_host, host))
                    if self.latency_us:
                        self._delay(namespace)
            except OSError as error:
                raise EmulatedNetworkError(
                    f"emulate_network: the kernel refused to create the network ({error.strerror}). Use a kernel with "
                    f"veth and tbf, and with bridge for more than two hosts, or omit emulate_network."
                ) from None
            if self._store_port is not None:
                stack.enter_context(StoreRelay(self.namespaces, self._store_port))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def namespace(self, host: int) -> int:
        """Return the network namespace of `host`, as a file descriptor."""
        return self.namespaces[host]

    def variables(self, host: int) -> dict[str, str]:
        """Return the environment variables of the processes of `host`."""
        return {"NCCL_SOCKET_IFNAME": INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE, HOST_VARIABLE: str(host)}

    def measure(self) -> list[LinkReached]:
        """Measure the bandwidth each way, and the round trip, between host 0 and every other host, over TCP."""
        seconds = max(_LEAST_SECONDS, _MEASURE_SECONDS / (2 * (self.num_hosts - 1)))
        links = []
        for host in range(1, self.num_hosts):
            ends = ((self.namespaces[0], _address(0)), (self.namespaces[host], _address(host)))
            speed = measure_link(*ends, seconds)
            links.append(LinkReached(hosts=(0, host), **speed))
        return links

    def _check(self) -> None:
        """Raise EmulatedNetworkError with a remedy for the usual obstacles."""
        if self.gb_per_s > _LARGEST_GB_PER_S:
            raise EmulatedNetworkError(
                f"emulate_network: gb_per_s={self.gb_per_s:g} exceeds the {_LARGEST_GB_PER_S} GB/s to which a token "
                f"bucket can be set. Use a smaller value, or on GPUs add transport: shared_memory."
            )
        if sys.platform != "linux" or os.geteuid() != 0:
            raise EmulatedNetworkError(
                "emulate_network needs root on Linux to create network namespaces. Run megabench as root, or omit "
                "emulate_network."
            )
        if importlib.util.find_spec("pyroute2") is None:
            raise EmulatedNetworkError(
                "emulate_network needs the package pyroute2. Install it with pip install 'megabench[emulation]'."
            )

    def _join_two(self, network: "IPRoute") -> None:
        """Join the two hosts. Runs in the first one."""
        peer = {"ifname": INTERFACE, "net_ns_fd": self.namespaces[1]}
        network.link("add", ifname=INTERFACE, kind="veth", peer=peer)

    def _join_by_bridge(self, network: "IPRoute") -> None:
        """Join all hosts with a bridge, and limit what each host receives."""
        network.link("add", ifname="bridge", kind="bridge")
        bridge = _index(network, "bridge")
        for host, namespace in enumerate(self.namespaces):
            port = f"port{host}"
            network.link("add", ifname=port, kind="veth", peer={"ifname": INTERFACE, "net_ns_fd": namespace})
            index = _index(network, port)
            network.link("set", index=index, master=bridge, mtu=_MTU_BYTES, state="up")
            self._limit(network, index)
        network.link("set", index=bridge, state="up")

    def _set_up_host(self, host: int, network: "IPRoute") -> None:
        """Give the host its address, and limit what it sends."""
        network.link("set", index=_index(network, "lo"), state="up")
        index = _index(network, INTERFACE)
        network.addr("add", index=index, address=_address(host), prefixlen=16)
        network.link("set", index=index, mtu=_MTU_BYTES, state="up")
        self._limit(network, index)

    def _limit(self, network: "IPRoute", index: int) -> None:
        """Limit what an interface sends, with a token bucket."""
        rate = int(self.gb_per_s * 1e9)
        burst = max(_SMALLEST_BURST_BYTES, int(rate * _BURST_SECONDS))
        network.tc("add", "tbf", index, handle=_BUCKET, rate=rate, burst=burst, latency=_QUEUE_TIME)

    def _delay(self, namespace: int) -> None:
        """Delay what a host sends, behind its token bucket. Raises EmulatedNetworkError if the kernel lacks netem."""

        def delay(network: "IPRoute") -> None:
            index = _index(network, INTERFACE)
            network.tc("add", "netem", index, parent=_BUCKET | 1, delay=self.latency_us, limit=_DELAYED_PACKETS)

        try:
            _configure(namespace, delay)
        except OSError as error:
            raise EmulatedNetworkError(
                f"emulate_network: latency_us={self.latency_us} needs the kernel's netem, which this machine lacks "
                f"({error.strerror}). Omit latency_us; gb_per_s works without it."
            ) from None


def check_emulated_host() -> None:
    """Raise EmulatedNetworkError unless a supervisor has started this process in the namespace of a host."""
    if HOST_VARIABLE not in os.environ:
        raise EmulatedNetworkError(
            "emulate_network works only in the trials of megabench compare on one machine. Write a study with this run "
            "as its only trial, or omit emulate_network."
        )


def _open_namespace(stack: ExitStack) -> int:
    """Create a namespace that `stack` closes. Raises EmulatedNetworkError."""
    try:
        namespace = create_namespace()
    except OSError as error:
        raise EmulatedNetworkError(
            f"emulate_network: this process may not create network namespaces ({error.strerror}). Run the container "
            f"with the capability SYS_ADMIN, or omit emulate_network."
        ) from None
    stack.callback(os.close, namespace)
    return namespace


def _configure(namespace: int, function: Callable[["IPRoute"], None]) -> None:
    """Call `function` with a connection to the kernel's configuration of a namespace. Raises OSError."""
    from pyroute2 import IPRoute, NetlinkError

    def call() -> None:
        try:
            with IPRoute() as network:
                function(network)
        except NetlinkError as error:
            raise OSError(error.code, os.strerror(error.code)) from None

    call_in_namespace(namespace, call)


def _index(network: "IPRoute", name: str) -> int:
    index: Any = network.link_lookup(ifname=name)[0]
    return int(index)


def _address(host: int) -> str:
    """Return the IPv4 address of a host, in a /16 network that only the hosts see."""
    high, low = divmod(host + 1, 256)
    return f"10.0.{high}.{low}"
