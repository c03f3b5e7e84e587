"""What NCCL says in its log (NCCL_DEBUG=INFO) about the transports it uses. Loads no torch.

Forms of the lines: NCCL 2.10 to 2.30, src/transport/{p2p,shm,net}.cc and src/init.cc.
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
    """A connection between two ranks of some communicator, numbered as in that communicator.

    `transport` is one of P2P/CUMEM, P2P/IPC, …, SHM, NET/Socket, NET/IB/GDRDMA, NET/Libfabric/GDRDMA, …; `pxn` tells
    that it goes to the network through another GPU.
    """

    sender: int
    receiver: int
    transport: str
    pxn: bool = False


@dataclass(frozen=True)
class Communicator:
    """What one process said of a communicator that it made."""

    rank: int
    num_ranks: int
    num_nodes: int
    local_ranks: int


@dataclass
class NcclLog:
    """What a log, or a part of one, says. `unknown` keeps the lines about channels that have no known form."""

    version: str | None = None
    network: str | None = None
    communicators: list[Communicator] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    nvls: bool = False
    unknown: list[str] = field(default_factory=list)

    @property
    def transports(self) -> list[str]:
        """The different transports of all connections, slowest first."""
        found = {connection.transport + " (PXN)" * connection.pxn for connection in self.connections}
        return in_order(found | ({"NVLS"} if self.nvls else set()))


def read(text: str) -> NcclLog:
    """What `text` says; a last line that was cut before its end is kept as unknown if it speaks of a channel."""
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
    """Different transports, slowest first: network, shared memory, peer to peer."""
    kinds = ("NET/Socket", "NET", "COLLNET", "SHM", "P2P", "NVLS")
    place = {name: next(n for n, kind in enumerate(kinds) if name.startswith(kind)) for name in transports}
    return sorted(place, key=lambda name: (place[name], name))


def disagreement(kind: str, link: str | None, transports: Sequence[str]) -> str | None:
    """What is wrong with the transports of a group whose slowest link is `link`; None when nothing is known to be."""
    on_network = [name for name in transports if name.startswith("NET/")]
    if on_network and link in ("nvlink", "pcie", "shm"):
        return f"NCCL uses {on_network[0]} between ranks of one host, where {link} was expected"
    if link == "nvlink" and "SHM" in transports:
        return "NCCL uses SHM where nvlink was expected"
    if link == "efa" and "NET/Socket" in on_network:
        return (
            "EFA was expected and NCCL uses NET/Socket; look for the aws-ofi-nccl plugin and, under Kubernetes, the "
            "vpc.amazonaws.com/efa request"
        )
    if link == "infiniband" and "NET/Socket" in on_network:
        return "InfiniBand was expected and NCCL uses NET/Socket; look at NCCL_IB_DISABLE and NCCL_IB_HCA"
    if on_network and kind == "tp":
        return f"tensor parallelism rides on {on_network[0]}, a slow link that every layer waits for"
    return None


class LogTail:
    """NCCL's log file of this process, read part by part; a file that is not there says nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._offset = 0

    def read_on(self) -> NcclLog:
        """What was written since the last call."""
        if self.path is None or not self.path.exists():
            return NcclLog()
        with self.path.open("rb") as file:
            return read(self._rest(file).decode(errors="replace"))

    def _rest(self, file: BinaryIO) -> bytes:
        file.seek(self._offset)
        content = file.read()
        self._offset += len(content)
        return content
