"""Bytes that this host's network interfaces sent and received, from the kernel's counters. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path

_NET = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class NicBytes:
    """Bytes that one network interface sent and received."""

    sent: int
    received: int


def read_nics(net: Path = _NET, infiniband: Path = _INFINIBAND) -> dict[str, NicBytes]:
    """Return the byte counters of all Ethernet, loopback, InfiniBand and EFA interfaces of this host, by name."""
    found = {}
    for interface in _children(net):
        counted = _read(interface / "statistics" / "tx_bytes"), _read(interface / "statistics" / "rx_bytes")
        if counted[0] is not None and counted[1] is not None:
            found[interface.name] = NicBytes(counted[0], counted[1])
    for device in _children(infiniband):
        for port in _children(device / "ports"):
            # EFA counts bytes. InfiniBand counts units of 4 bytes (Documentation/ABI/stable/sysfs-class-infiniband).
            efa = _read(port / "hw_counters" / "tx_bytes"), _read(port / "hw_counters" / "rx_bytes")
            words = _read(port / "counters" / "port_xmit_data"), _read(port / "counters" / "port_rcv_data")
            name = f"{device.name}/{port.name}"
            if efa[0] is not None and efa[1] is not None:
                found[name] = NicBytes(efa[0], efa[1])
            elif words[0] is not None and words[1] is not None:
                found[name] = NicBytes(4 * words[0], 4 * words[1])
    return found


def since(before: dict[str, NicBytes], now: dict[str, NicBytes]) -> dict[str, NicBytes]:
    """Return the bytes that each interface transferred between two readings. Idle interfaces are omitted."""
    moved = {
        name: NicBytes(now[name].sent - old.sent, now[name].received - old.received)
        for name, old in before.items()
        if name in now
    }
    return {name: nic for name, nic in moved.items() if nic.sent > 0 or nic.received > 0}


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
