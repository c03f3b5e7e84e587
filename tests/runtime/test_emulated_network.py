"""The network between emulated hosts: its bandwidth, its store, and what remains of it."""

import os
import socket
from functools import partial

import pytest

from megabench.record import EmulatedNetworkUsed, LinkReached
from megabench.runtime import emulated_network
from megabench.runtime.emulated_network import INTERFACE, EmulatedNetwork, EmulatedNetworkError
from megabench.runtime.namespace import call_in_namespace
from megabench.runtime.rendezvous import open_store
from tests.runtime.emulated import needs_namespaces, network_state


@needs_namespaces
@pytest.mark.parametrize(
    ("num_hosts", "gb_per_s"), [(2, 0.05), (2, 0.2), (2, 0.5), (2, 1.0), (3, 0.3), (4, 0.1), (4, 0.5)]
)
def test_every_host_sends_and_receives_at_the_set_bandwidth(num_hosts: int, gb_per_s: float) -> None:
    best = [0.0] * (2 * (num_hosts - 1))
    with EmulatedNetwork(num_hosts, gb_per_s) as network:
        # a token bucket is never faster than its rate, but other processes on the same CPUs can make the probe slower
        for _ in range(10):
            links = network.measure()
            assert [link.hosts for link in links] == [(0, host) for host in range(1, num_hosts)]
            assert any(0 < link.round_trip_us < 5000 for link in links)
            rates = [rate for link in links for rate in (link.forth_gb_per_s, link.back_gb_per_s)]
            assert max(rates) <= 1.1 * gb_per_s
            best = [max(pair) for pair in zip(best, rates, strict=True)]
            if min(best) >= 0.9 * gb_per_s:
                break
    assert best == pytest.approx([gb_per_s] * len(best), rel=0.1)


@needs_namespaces
def test_hosts_see_each_other_and_nothing_else() -> None:
    before, descriptors = network_state(), set(os.listdir("/proc/self/fd"))
    with EmulatedNetwork(2, 1.0) as network:
        assert network_state() == before, "the machine's own network does not change, even while the hosts exist"
        for namespace in network.namespaces:
            interfaces = call_in_namespace(namespace, socket.if_nameindex)
            assert {name for _, name in interfaces} - {"ifb0", "ifb1"} >= {"lo", INTERFACE}
            with pytest.raises(OSError, match="unreachable"):
                call_in_namespace(namespace, partial(socket.create_connection, ("192.0.2.1", 80), 1.0))
        assert network.variables(1)["NCCL_SOCKET_IFNAME"] == network.variables(1)["GLOO_SOCKET_IFNAME"] == INTERFACE
    assert network_state() == before
    assert set(os.listdir("/proc/self/fd")) == descriptors


@needs_namespaces
def test_hosts_reach_the_store_of_the_machine() -> None:
    store = open_store()
    descriptors = set(os.listdir("/proc/self/fd"))
    with EmulatedNetwork(2, 0.1, store_port=store.port) as network:
        for host, namespace in enumerate(network.namespaces):
            other = call_in_namespace(namespace, partial(_connect, store.port))
            other.set(f"from/{host}", "x" * 100_000)
            assert len(store.get(f"from/{host}")) == 100_000
            del other
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def _connect(port: int):
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, world_size=None, is_master=False)


@needs_namespaces
def test_an_error_inside_removes_the_network() -> None:
    before, descriptors = network_state(), set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="inside"), EmulatedNetwork(3, 1.0):
        raise ValueError("inside")
    assert (network_state(), set(os.listdir("/proc/self/fd"))) == (before, descriptors)


@needs_namespaces
def test_a_latency_needs_netem() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    try:
        with EmulatedNetwork(2, 0.1, latency_us=2000) as network:
            (link,) = network.measure()
        assert link.round_trip_us == pytest.approx(4000, rel=0.25)
    except EmulatedNetworkError as error:
        assert "latency_us=2000 needs the kernel's netem, which this machine lacks" in str(error)
    assert set(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("gb_per_s", "change", "words"),
    [
        (5.0, None, r"4.29 GB/s to which a token bucket can be set. Use a .* or on GPUs add transport: shared_memory"),
        (1.0, ("os.geteuid", lambda: 1000), "emulate_network needs root on Linux"),
        (1.0, ("sys.platform", "darwin"), "emulate_network needs root on Linux"),
        (1.0, ("importlib.util.find_spec", lambda name: None), r"pip install 'megabench\[emulation\]'"),
    ],
)
def test_what_cannot_be_emulated_is_refused_with_a_remedy(monkeypatch, gb_per_s, change, words) -> None:
    monkeypatch.setattr(emulated_network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(emulated_network.importlib.util, "find_spec", lambda name: object())
    if change:
        monkeypatch.setattr(*change)
    with pytest.raises(EmulatedNetworkError, match=words), EmulatedNetwork(2, gb_per_s):
        pass


def test_a_process_without_the_right_to_create_namespaces_is_refused(monkeypatch) -> None:
    def refuse() -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(emulated_network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(emulated_network.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(emulated_network, "create_namespace", refuse)
    with pytest.raises(EmulatedNetworkError, match="Run the container with the capability SYS_ADMIN"):
        EmulatedNetwork(2, 1.0).__enter__()


def used(before: float, after: float, latency_us: int = 0) -> EmulatedNetworkUsed:
    links = [
        LinkReached(hosts=(0, 1), forth_gb_per_s=rate, back_gb_per_s=2.0, round_trip_us=40.0)
        for rate in (before, after)
    ]
    return EmulatedNetworkUsed(gb_per_s=2.0, latency_us=latency_us, before=links[:1], after=links[1:])


def test_a_measurement_outside_the_tolerance_is_a_warning() -> None:
    assert used(1.9, 2.1).warnings == []
    assert used(1.7, 2.0).warnings == [
        "the network between emulated hosts is set to 2 GB/s, but reached 1.7 to 2 GB/s before the run, which differs "
        "by more than 10%"
    ]
    assert used(2.0, 2.0, 50).sentence == (
        "Network between emulated hosts: set to 2 GB/s and 50 µs; reached 2 GB/s before the run and 2 GB/s after the "
        "run, round trip 40 µs."
    )
    assert EmulatedNetworkUsed(gb_per_s=2.0, latency_us=0).sentence.endswith("set to 2 GB/s.")
    over = EmulatedNetworkUsed(gb_per_s=25.0, latency_us=10, transport="shared_memory")
    assert over.sentence == "Network between emulated hosts over shared memory: set to 25 GB/s and 10 µs."
