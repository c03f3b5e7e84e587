"""Parser of the transports in NCCL's log (NCCL_DEBUG=INFO). Loads no torch.

The line formats are those of NCCL 2.10 to 2.30, in src/transport/{p2p,shm,net}.cc and src/init.cc.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_PREFIX = r"^\S+:\d+:\d+ \[\d+\] NCCL (?:INFO|WARN) "
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_NETWORK = re.compile(_PREFIX + r"Using network (.+)$")
_COMMUNICATOR = re.compile(_PREFIX + r"comm 0x\w+ rank (\d+) nRanks (\d+) nNodes (\d+) localRanks (\d+)")
_CHANNEL = re.compile(
    _PREFIX + r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(?:send|receive)\])? via (.+)$"
)
_NVLS = re.compile(_PREFIX + r"Connected NVLS tree")
_SPEAKS_OF_A_CHANNEL = re.compile(r"NCCL INFO Channel .*(?:->|\bvia\b)")

_P2P = re.compile(r"P2P/(CUMEM|IPC|direct pointer|MNNVL|indirect)(?:/[\w.\[\]]+)*")
_SHM = re.compile(r"SHM(?:/\w+)*")
_NET = re.compile(r"(NET|COLLNET)/([A-Za-z][\w .-]*)/\d+(\(\d+\))?((?:/\w+)*)")


@dataclass(frozen=True)
class Connection:
    """A connection between two ranks of a communicator. Rank numbers are those of the communicator.

    `transport` is for example P2P/CUMEM, P2P/IPC, SHM, NET/Socket, NET/IB/GDRDMA or NET/Libfabric/GDRDMA. `pxn` is True
    if the connection reaches the network through another GPU (NCCL's PXN).
    """

    sender: int
    receiver: int
    transport: str
    pxn: bool = False


@dataclass(frozen=True)
class Communicator:
    """A communicator, as one of its ranks logged it."""

    rank: int
    num_ranks: int
    num_nodes: int
    local_ranks: int


@dataclass
class NcclLog:
    """The parsed contents of a log or of a part of a log. `unknown` contains channel lines in an unknown format."""

    version: str | None = None
    network: str | None = None
    communicators: list[Communicator] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    nvls: bool = False
    unknown: list[str] = field(default_factory=list)

    @property
    def transports(self) -> list[str]:
        """The distinct transports of all connections, slowest first."""
        found = {connection.transport + " (PXN)" * connection.pxn for connection in self.connections}
        return in_order(found | ({"NVLS"} if self.nvls else set()))


def read(text: str) -> NcclLog:
    """Parse `text`. If the last line is incomplete and mentions a channel, the line is stored in `unknown`."""
    log = NcclLog()
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            if "Channel" in line:
                log.unknown.append(line)
            break
        _read_line(line.rstrip("\r\n"), log)
    return log


def _read_line(line: str, log: NcclLog) -> None:
    if match := _CHANNEL.match(line):
        connection = _connection(match)
        if connection:
            log.connections.append(connection)
        else:
            log.unknown.append(line)
    elif match := _COMMUNICATOR.match(line):
        log.communicators.append(Communicator(*map(int, match.groups())))
    elif match := _NETWORK.match(line):
        log.network = match[1]
    elif match := _VERSION.search(line):
        log.version = match[1]
    elif _NVLS.match(line):
        log.nvls = True
    elif _SPEAKS_OF_A_CHANNEL.search(line):
        log.unknown.append(line)


def _connection(match: re.Match[str]) -> Connection | None:
    sender, receiver, via = int(match[1]), int(match[2]), match[3].strip()
    if found := _P2P.fullmatch(via):
        return Connection(sender, receiver, f"P2P/{found[1]}")
    if _SHM.fullmatch(via):
        return Connection(sender, receiver, "SHM")
    if found := _NET.fullmatch(via):
        gdr = "/GDRDMA" if "/GDRDMA" in found[4] else ""
        return Connection(sender, receiver, f"{found[1]}/{found[2]}{gdr}", pxn=found[3] is not None)
    return None


def in_order(transports: Iterable[str]) -> list[str]:
    """Return the distinct transports, slowest first: network, shared memory, peer-to-peer, NVLink SHARP."""
    kinds = ("NET/Socket", "NET", "COLLNET", "SHM", "P2P", "NVLS")
    place = {name: next(n for n, kind in enumerate(kinds) if name.startswith(kind)) for name in transports}
    return sorted(place, key=lambda name: (place[name], name))


def disagreement(kind: str, link: str | None, transports: Sequence[str]) -> str | None:
    """Return a warning if NCCL's transports of a group are slower than its slowest link `link`, else None.

    Tensor parallelism over the network also causes a warning.
    """
    on_network = [name for name in transports if name.startswith("NET/")]
    if on_network and link in ("nvlink", "pcie", "shm"):
        return f"NCCL uses {on_network[0]} between ranks of one host, where {link} was expected"
    if link == "nvlink" and "SHM" in transports:
        return "NCCL uses SHM where nvlink was expected"
    if link == "efa" and "NET/Socket" in on_network:
        return (
            "EFA was expected, but NCCL uses NET/Socket. Check that the aws-ofi-nccl plugin is installed and, under "
            "Kubernetes, that the pod requests vpc.amazonaws.com/efa."
        )
    if link == "infiniband" and "NET/Socket" in on_network:
        return "InfiniBand was expected, but NCCL uses NET/Socket. Check NCCL_IB_DISABLE and NCCL_IB_HCA."
    if on_network and kind == "tp":
        return f"tensor parallelism communicates over {on_network[0]}, a slow link that every layer waits for"
    return None


class LogTail:
    """Incremental reader of this process's NCCL log file. A missing file counts as an empty log."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._offset = 0

    def read_on(self) -> NcclLog:
        """Parse and return the part of the log that NCCL has written since the last call."""
        if self.path is None or not self.path.exists():
            return NcclLog()
        with self.path.open("rb") as file:
            return read(self._rest(file).decode(errors="replace"))

    def _rest(self, file: BinaryIO) -> bytes:
        file.seek(self._offset)
        content = file.read()
        self._offset += len(content)
        return content
