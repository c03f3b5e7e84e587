"""Parser of the transports in NCCL's log (NCCL_DEBUG=INFO). Loads no torch.

The line formats are those of NCCL 2.10 to 2.30, in src/transport/{p2p,shm,net}.cc and src/init.cc. Launchers may add
any prefix to a line: "pod-1: ", "[rank3]:", "[1,0]<stdout>:", a timestamp.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"(?:^|[^\w.-])([\w.-]+):(\d{1,10}):\d+ \[-?\d+\] (?:\S+ )?NCCL (INFO|WARN) (.*)$")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_NETWORK = re.compile(r"Using network (.+)$")
_COMMUNICATOR = re.compile(r"comm (0x\w+) rank (\d{1,6}) nRanks (\d{1,6}) nNodes (\d{1,6}) localRanks ([1-9]\d{0,5})")
_INIT = re.compile(
    r"(?:\S+ )?comm (0x\w+) rank (\d{1,6}) nranks (\d{1,6}) cudaDev (\d+)(?: nvmlDev (\d+))? busId (\w+)"
    r"(?: commId (0x\w+))?(?: parent (0x\w+) splitCount (\d{1,9}) color (-?\d{1,19}) key -?\d+)?"
    r" ?- Init (START|COMPLETE)"
)
# RCCL appends the communicator to a channel line.
_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d{1,6})\[(\w+)\] -> (\d{1,6})\[(\w+)\](?: \[(send|receive)\])? via (.+?)"
    r"(?: comm (0x\w+) nRanks \d+)?$"
)
_NVLS = re.compile(r"Connected NVLS tree")
_SPEAKS_OF_A_CHANNEL = re.compile(r"NCCL INFO Channel .*(?:->|\bvia\b)")
_ENVIRONMENT = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.+?)\.?$")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;-]+)")
_PLUGIN = re.compile(r"NET/OFI (?:Using|Initializing) (aws-ofi-nccl \S+)|NET/Plugin ?: Loaded net plugin (\S+)")
_NO_PLUGIN = re.compile(r"NET/Plugin ?: .*(?:No plugin found|Could not find: )")
_PLATFORM = re.compile(r"NET/OFI Running on (\S+) platform")
# The first part of the type is the slowest path between the GPUs of a host, as in nvidia-smi topo -m.
_GRAPH = re.compile(r"Pattern \d+, .*\btype (\w+)/\w+")
_NVLINK = re.compile(r"\+ NVL\[|NVLS multicast support is available|NVLS Head")

_P2P = re.compile(r"P2P/(CUMEM|IPC|direct pointer|MNNVL|indirect)(?:/[\w.\[\]]+)*")
_SHM = re.compile(r"SHM(?:/\w+)*|direct shared memory")
_NET = re.compile(r"(NET|COLLNET)/([A-Za-z][\w .-]*)/\d+(\(\d+\))?((?:/\w+)*)")

CHECK_EFA = (
    "Check that the aws-ofi-nccl plugin is installed and, under Kubernetes, that the pod requests "
    "vpc.amazonaws.com/efa."
)
INFINIBAND_VARIABLES = "NCCL_IB_DISABLE and NCCL_IB_HCA"


class Process(NamedTuple):
    """A process that wrote to NCCL's log."""

    host: str
    pid: int


@dataclass(frozen=True)
class Connection:
    """A connection between two ranks of a communicator. Rank numbers are those of the communicator.

    `transport` is for example P2P/CUMEM, P2P/IPC, SHM, NET/Socket, NET/IB/GDRDMA or NET/Libfabric/GDRDMA. `pxn` is True
    if the connection reaches the network through another GPU (NCCL's PXN). `process` wrote the line. It is the receiver
    if `is_received`, else the sender. `devices` are NCCL's device numbers or bus ids of the sender and the receiver.
    `handle` is the address of the communicator, which only RCCL logs.
    """

    sender: int
    receiver: int
    transport: str
    pxn: bool = False
    process: Process | None = field(default=None, compare=False)
    is_received: bool = field(default=False, compare=False)
    devices: tuple[str, str] = field(default=("", ""), compare=False)
    handle: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Communicator:
    """A communicator, as one of its ranks logged it. `handle` is its address in `process`."""

    rank: int
    num_ranks: int
    num_nodes: int
    local_ranks: int
    process: Process | None = field(default=None, compare=False)
    handle: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CommInit:
    """The creation of a communicator by one rank. `handle` is the address of the communicator in `process`.

    `comm_id` is equal for all ranks of a communicator. A communicator from ncclCommSplit has `split` instead: the
    handle of its parent, the number of the split and the color. NCCL before 2.17 logs neither. `devices` are the names
    of the rank's GPU in channel lines. `is_start` is False if NCCL logged only the end of the creation.
    """

    process: Process
    handle: str
    rank: int
    num_ranks: int
    bus_id: str
    devices: frozenset[str]
    comm_id: str | None
    split: tuple[str, int, int] | None
    is_start: bool


@dataclass
class NcclLog:
    """The parsed contents of a log or of a part of a log. `unknown` contains channel lines in an unknown format.

    `events` contains the created communicators and the connections in the order of the log. `provider` is the libfabric
    provider, `platform` the instance type that aws-ofi-nccl detected. `complaints` are messages about network plugins
    that were not loaded, and warnings about the network. `environment` contains the NCCL variables that NCCL reports.
    `intra_host_paths` contains path types between the GPUs of a host: NVL, PIX, PXB, PHB, SYS.
    """

    version: str | None = None
    network: str | None = None
    provider: str | None = None
    plugin: str | None = None
    platform: str | None = None
    complaints: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    intra_host_paths: set[str] = field(default_factory=set)
    hosts: list[str] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    events: list[CommInit | Connection] = field(default_factory=list)
    nvls: bool = False
    unknown: list[str] = field(default_factory=list)

    @property
    def connections(self) -> list[Connection]:
        """Return the connections, in the order in which the log lists them."""
        return [event for event in self.events if isinstance(event, Connection)]

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
        read_line(line.rstrip("\r\n"), log)
    return log


def read_line(line: str, log: NcclLog) -> None:
    """Parse one line without its line break, and add its content to `log`."""
    if "NCCL" not in line:
        return
    if found := _LINE.search(line):
        process = Process(found[1], int(found[2]))
        if process.host not in log.hosts:
            log.hosts.append(process.host)
        _read_message(found[4].rstrip(), process, found[3] == "WARN", line, log)
    elif match := _VERSION.search(line):
        log.version = match[1]
    elif _SPEAKS_OF_A_CHANNEL.search(line):
        log.unknown.append(line)


def _read_message(message: str, process: Process, is_warning: bool, line: str, log: NcclLog) -> None:
    if match := _CHANNEL.match(message):
        connection = _connection(match, process)
        if connection:
            log.events.append(connection)
        else:
            log.unknown.append(line)
        if match[6].startswith("P2P") and "/read" in match[6]:  # NCCL reads from the peer only over NVLink
            log.intra_host_paths.add("NVL")
    elif match := _COMMUNICATOR.match(message):
        rank, num_ranks, num_nodes, local_ranks = map(int, match.groups()[1:])
        log.communicators.append(Communicator(rank, num_ranks, num_nodes, local_ranks, process, match[1]))
    elif match := _INIT.match(message):
        _add_init(match, process, log)
    elif match := _NETWORK.match(message):
        log.network = match[1]
    elif match := _VERSION.search(message):
        log.version = match[1]
    elif match := _GRAPH.match(message):
        log.intra_host_paths.add(match[1])
    elif match := _ENVIRONMENT.match(message):
        log.environment[match[1]] = match[2]
    elif _NVLS.match(message):
        log.nvls = True
    elif _NVLINK.match(message):
        log.intra_host_paths.add("NVL")
    elif _SPEAKS_OF_A_CHANNEL.search(line):
        log.unknown.append(line)
    else:
        _read_plugin(message, is_warning, log)


def _read_plugin(message: str, is_warning: bool, log: NcclLog) -> None:
    if match := _PROVIDER.match(message):
        log.provider = match[1]
    elif match := _PLUGIN.match(message):
        log.plugin = match[1] or log.plugin or match[2]
    elif match := _PLATFORM.match(message):
        log.platform = match[1]
    elif (_NO_PLUGIN.match(message) or (is_warning and "NET/" in message)) and message not in log.complaints:
        log.complaints.append(message)


def _add_init(match: re.Match[str], process: Process, log: NcclLog) -> None:
    handle, rank, num_ranks, cuda, nvml, bus_id, comm_id, parent, split_count, color, state = match.groups()
    init = CommInit(
        process=process,
        handle=handle,
        rank=int(rank),
        num_ranks=int(num_ranks),
        bus_id=bus_id,
        devices=frozenset({cuda, nvml or cuda, bus_id}),
        comm_id=comm_id,
        split=(parent, int(split_count), int(color)) if parent else None,
        is_start=state == "START",
    )
    mine = (event for event in reversed(log.events) if isinstance(event, CommInit) and event.process == process)
    started = next((event for event in mine if event.handle == handle), None)
    if init.is_start or started is None or not started.is_start:
        log.events.append(init)


def _connection(match: re.Match[str], process: Process) -> Connection | None:
    sender, sender_device, receiver, receiver_device, direction, via, handle = match.groups()
    if found := _P2P.fullmatch(via.strip()):
        transport = f"P2P/{found[1]}"
    elif _SHM.fullmatch(via.strip()):
        transport = "SHM"
    elif found := _NET.fullmatch(via.strip()):
        transport = f"{found[1]}/{found[2]}" + "/GDRDMA" * ("/GDRDMA" in found[4])
    else:
        return None
    return Connection(
        int(sender),
        int(receiver),
        transport,
        pxn=bool(found and transport.startswith(("NET", "COLLNET")) and found[3] is not None),
        process=process,
        is_received=direction == "receive",
        devices=(sender_device, receiver_device),
        handle=handle,
    )


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
        place = "NVLink domain" if link == "nvlink" else "host"
        return f"NCCL uses {on_network[0]} between ranks of one {place}, where {link} was expected"
    if link == "nvlink" and "SHM" in transports:
        return "NCCL uses SHM where nvlink was expected"
    if link == "efa" and "NET/Socket" in on_network:
        return f"EFA was expected, but NCCL uses NET/Socket. {CHECK_EFA}"
    if link == "infiniband" and "NET/Socket" in on_network:
        return f"InfiniBand was expected, but NCCL uses NET/Socket. Check {INFINIBAND_VARIABLES}."
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
            file.seek(self._offset)
            content = file.read()
        self._offset += len(content)
        return read(content.decode(errors="replace"))
