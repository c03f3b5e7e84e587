"""Parser of the transports in NCCL's log (NCCL_DEBUG=INFO). Loads no torch.

The line formats are those of NCCL 2.4 to 2.30, in src/transport/{p2p,shm,net,coll_net}.cc, src/init.cc and
src/debug.cc. Launchers may add any prefix to a line: "pod-1: ", "[rank3]:", "[1,0]<stdout>:", a timestamp.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

_LEVEL = re.compile(r"NCCL (?:INFO|WARN) ")
# A warning also names the place in the source: "[0] net.cc:12 NCCL WARN", "[0] net.cc:12 (function) NCCL WARN".
_HEAD = re.compile(r"(?:^|[^\w.-])([\w.-]+|\[[\w.-]+\]|<[\w.-]+>):(\d{1,10}):\d+ \[-?\d+\] (?:\S+ ){0,2}$")
_FRAME = " \t\r│"  # k9s draws a frame around a log
# Ray prints similar lines once, with a repeat count. With RAY_DEDUP_LOGS=0 it prints all of them.
_REPEATED = re.compile(r"\s*\[repeated (\d{1,9})x across cluster\].*")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")

# The words of the line and their number depend on the version: parent, splitCount or childCount, color, commId, …
_INIT = re.compile(r"(?:.* )?comm (0x\w+)((?: \S+)*?) ?- Init (START|COMPLETE)")
_PAIR = re.compile(r"(\w+) (-?\w+)")
_COMMUNICATOR = re.compile(r"comm (0x\w+) rank (\d{1,6}) nRanks (\d{1,6}) nNodes (\d{1,6}) localRanks ([1-9]\d{0,5})")
# RCCL appends the communicator to a channel line. NCCL before 2.6 writes Ring, and names devices only for P2P and SHM.
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (\d{1,6})(?:\[(\w+)\])? -> (\d{1,6})(?:\[(\w+)\])?"
    r"(?: \[(send|receive)\])? via (.+?)(?: comm (0x\w+) nRanks \d+)?"
)
_COLLNET = re.compile(r"Coll(?:Net)? \d+(?:/\d+)? : \d+ \[(?:send|receive)\] via (COLLNET/[\w .-]+)/\d+(\S*)")
_NUMBER = re.compile(r"[0-9]{1,6}")

_P2P = re.compile(r"(P2P/(?:CUMEM|IPC|direct pointer|MNNVL)(?:/read)?)(?:/CE)?|(P2P/indirect)/\d+\[\w+\]")
_SHM = re.compile(r"SHM(?:/(?:direct|CE)){0,2}|direct shared memory")
_NET = re.compile(r"(NET|COLLNET)/([A-Za-z][\w .-]*)/\d+(\(\d+\))?(/GDRDMA(?:\(PCI\))?)?(?:/Shared)?")

CHECK_EFA = (
    "Check that the aws-ofi-nccl plugin is installed and, under Kubernetes, that the pod requests "
    "vpc.amazonaws.com/efa."
)
EMULATED = "NET/Emulated"  # tools/emulated_network/net_plugin.c
INFINIBAND_VARIABLES = "NCCL_IB_DISABLE and NCCL_IB_HCA"


class Process(NamedTuple):
    """A process that wrote to NCCL's log."""

    host: str
    pid: int


@dataclass(frozen=True)
class Connection:
    """A connection between two ranks of a communicator. Rank numbers are those of the communicator.

    `transport` is for example P2P/CUMEM/read, P2P/IPC, SHM, NET/Socket, NET/IB/GDRDMA or NET/Libfabric/GDRDMA. NCCL
    appends /read if it reads from the peer, which it does only over NVLink. `pxn` is True if the connection reaches the
    network through another GPU (NCCL's PXN). `process` wrote the line. It is the receiver if `is_received`, else the
    sender. `devices` are NCCL's device numbers or bus ids of the sender and the receiver, or empty. `handle` is the
    address of the communicator, which only RCCL logs.
    """

    sender: int
    receiver: int
    transport: str
    pxn: bool = False
    process: Process | None = field(default=None, compare=False)
    is_received: bool = field(default=False, compare=False)
    devices: tuple[str, str] = field(default=("", ""), compare=False)
    handle: str | None = field(default=None, compare=False)

    @property
    def own_rank(self) -> int:
        """The rank of the process that wrote the line."""
        return self.receiver if self.is_received else self.sender


@dataclass(frozen=True)
class Communicator:
    """A communicator, as one of its ranks logged it. `handle` is its address in `process`."""

    rank: int
    num_ranks: int
    num_nodes: int
    local_ranks: int
    process: Process | None = field(default=None, compare=False)
    handle: str | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class CommInit:
    """The creation of a communicator by one rank. `handle` is the address of the communicator in `process`.

    `comm_id` is equal for all ranks of a communicator. A communicator from ncclCommSplit has `split`: the handle of its
    parent, the number of the split if NCCL logs it (since 2.24), and the color. NCCL before 2.17 logs neither.
    `devices` are the names of the rank's GPU in channel lines. `is_start` is False if NCCL logged only the end of the
    creation.
    """

    process: Process
    handle: str
    rank: int
    num_ranks: int
    bus_id: str
    devices: frozenset[str]
    comm_id: str | None
    split: tuple[str, int | None, int] | None
    is_start: bool


@dataclass(frozen=True)
class UnknownInit:
    """The creation of a communicator by `process`, in a line of an unknown format."""

    process: Process


Event = CommInit | UnknownInit | Connection


@dataclass
class NcclLog:
    """The parsed contents of a log or of a part of a log.

    `unknown` contains lines about channels and communicators in an unknown format. `events` contains the created
    communicators and the distinct connections in the order of the log. `provider` is the libfabric provider, `platform`
    the instance type that aws-ofi-nccl detected. `complaints` are messages about network plugins that were not loaded,
    and warnings about the network. `environment` contains the NCCL variables that NCCL reports. `intra_host_paths`
    contains path types between the GPUs of a host: NVL, PIX, PXB, PHB, SYS. `offloads` contains the transports of
    reductions in switches: NVLS and COLLNET. `num_repeated` is the number of lines that Ray left out.
    """

    version: str | None = None
    network: str | None = None
    provider: str | None = None
    plugin: str | None = None
    platform: str | None = None
    complaints: dict[str, None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    intra_host_paths: set[str] = field(default_factory=set)
    hosts: dict[str, None] = field(default_factory=dict)
    communicators: list[Communicator] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    offloads: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    num_repeated: int = 0
    # The handles of the communicators that a process created, and its connections since the last creation.
    _handles: dict[Process, set[str]] = field(default_factory=dict, repr=False)
    _connected: dict[Process, set[str]] = field(default_factory=dict, repr=False)

    @property
    def connections(self) -> list[Connection]:
        """Return the distinct connections, in the order in which the log lists them."""
        return [event for event in self.events if isinstance(event, Connection)]

    @property
    def transports(self) -> list[str]:
        """The distinct transports of all connections, slowest first."""
        found = {connection.transport + " (PXN)" * connection.pxn for connection in self.connections}
        return in_order(found | self.offloads)


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
    """Parse one line without its line break, and add its content to `log`.

    A line that contains two messages, because two processes wrote at once, counts as unknown.
    """
    head, level, message = line.partition("NCCL INFO ")
    is_warning = not level
    if is_warning:
        head, level, message = line.partition("NCCL WARN ")
    process = _process(head) if level else None
    if process is None:
        if match := _VERSION.search(line):
            log.version = match[1]
        elif level and _rule_of(message.rstrip(_FRAME)):
            log.unknown.append(line)
        return
    log.hosts[process.host] = None
    message = message.rstrip(_FRAME)
    if "[repeated " in message and (repeated := _REPEATED.search(message)):
        log.num_repeated += int(repeated[1])
        message = message[: repeated.start()]
    if message.partition(" : ")[2] in log._connected.get(process, ()):
        return  # another channel between two ranks
    rule = _rule_of(message)
    if "NCCL INFO " in message or "NCCL WARN " in message:
        if rule:
            log.unknown.append(line)
        for found in _LEVEL.finditer(line):
            if (mixed := _process(line[: found.start()])) and "- Init " in line:
                _add_unknown_init(mixed, line, log)
    elif rule is None:
        _read_fact(message, is_warning, log)
    elif not ((match := rule.form.fullmatch(message)) and rule.read(match, process, log)):
        log.unknown.append(line)
        if rule.form is _INIT:
            _add_unknown_init(process, line, log)


def _add_unknown_init(process: Process, line: str, log: NcclLog) -> None:
    """Note that `process` may have created a communicator. NCCL may also have logged the start of the creation."""
    if "- Init START" in line or process not in log._handles:
        log.events.append(UnknownInit(process))
        log._connected.pop(process, None)


@lru_cache(maxsize=65536)
def _process(head: str) -> Process | None:
    """Return the process from the part of a line before "NCCL INFO", or None for an unknown format."""
    match = _HEAD.search(head)
    return Process(match[1], int(match[2])) if match else None


def _read_connection(match: re.Match[str], process: Process, log: NcclLog) -> bool:
    sender, sender_device, receiver, receiver_device, direction, via, handle = match.groups()
    transport = _transport(via.strip())
    if transport is None:
        return False
    name, pxn = transport
    log._connected.setdefault(process, set()).add(match.string.partition(" : ")[2])
    devices = sender_device or "", receiver_device or ""
    is_received = direction == "receive"
    log.events.append(Connection(int(sender), int(receiver), name, pxn, process, is_received, devices, handle))
    if name.startswith("P2P") and name.endswith("/read"):
        log.intra_host_paths.add("NVL")
    return True


def _transport(via: str) -> tuple[str, bool] | None:
    """Return the name of a transport, and whether it uses PXN. Return None if the transport is unknown."""
    if found := _P2P.fullmatch(via):
        return found[1] or found[2], False
    if _SHM.fullmatch(via):
        return "SHM", False
    if found := _NET.fullmatch(via):
        return f"{found[1]}/{found[2]}" + "/GDRDMA" * bool(found[4]), found[3] is not None
    return None


def _read_init(match: re.Match[str], process: Process, log: NcclLog) -> bool:
    words: dict[str, str] = dict(_PAIR.findall(match[2]))
    if not all(_NUMBER.fullmatch(words.get(name, "")) for name in ("rank", "nranks", "cudaDev")):
        return False
    parent, color = words.get("parent"), words.get("color", "")
    count = words.get("splitCount", words.get("childCount"))
    if parent and not all(re.fullmatch("-?[0-9]{1,19}", number) for number in (color, count or "0")):
        return False
    handles = log._handles.setdefault(process, set())
    is_start = match[3] == "START"
    if not is_start and match[1] in handles:
        handles.remove(match[1])
        return True
    if is_start:
        handles.add(match[1])
    log._connected[process] = set()
    cuda, bus_id = words["cudaDev"], words.get("busId", "")
    log.events.append(
        CommInit(
            process=process,
            handle=match[1],
            rank=int(words["rank"]),
            num_ranks=int(words["nranks"]),
            bus_id=bus_id,
            devices=frozenset({cuda, words.get("nvmlDev", cuda), bus_id}),
            comm_id=words.get("commId"),
            split=(parent, int(count) if count else None, int(color)) if parent else None,
            is_start=is_start,
        )
    )
    return True


def _read_communicator(match: re.Match[str], process: Process, log: NcclLog) -> bool:
    rank, num_ranks, num_nodes, local_ranks = map(int, match.groups()[1:5])
    log.communicators.append(Communicator(rank, num_ranks, num_nodes, local_ranks, process, match[1]))
    return True


def _read_collnet(match: re.Match[str], process: Process, log: NcclLog) -> bool:
    log.offloads.add(match[1] + "/GDRDMA" * ("/GDRDMA" in match[2]))
    return True


class _Rule(NamedTuple):
    """A kind of line that tells connections or communicators.

    A message that contains `sign` and does not have the form `form` is unknown.
    """

    sign: re.Pattern[str]
    form: re.Pattern[str]
    read: Callable[[re.Match[str], Process, NcclLog], bool]


_RULES = (
    # Channel 00/02 : 0 1 2 3 lists ranks.
    _Rule(re.compile(r"Channel\b(?! \d+(?:/\d+)? :[ \d]*(?: comm .*)?$)|Ring\b.*\bvia\b"), _CHANNEL, _read_connection),
    _Rule(re.compile(r"Coll(?:Net)? .*\bvia\b"), _COLLNET, _read_collnet),
    _Rule(re.compile(r".*- Init (?:START|COMPLETE)"), _INIT, _read_init),
    _Rule(re.compile(r"comm .* nNodes "), re.compile(_COMMUNICATOR.pattern + ".*"), _read_communicator),
)


def _rule_of(message: str) -> _Rule | None:
    return next((rule for rule in _RULES if rule.sign.match(message)), None)


# The other facts in a log: the form of the message, and the field of NcclLog. Later lines replace earlier ones.
_FIELDS = (
    (re.compile(r"Using network (.+)"), "network"),
    (re.compile(r".*NCCL version (\d+\.\d+\.\d+)"), "version"),
    (re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;-]+)"), "provider"),
    (re.compile(r"NET/OFI (?:Using|Initializing) (aws-ofi-nccl \S+)"), "plugin"),
    (re.compile(r"NET/OFI Running on (\S+) platform"), "platform"),
)
_LOADED = re.compile(r"NET/Plugin ?: Loaded net plugin (\S+)")
_NO_PLUGIN = re.compile(r"NET/Plugin ?: .*(?:No plugin found|Could not find: )")
_ENVIRONMENT = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.+?)\.?$")
# The first part of the type is the slowest path between the GPUs of a host, as in nvidia-smi topo -m.
_GRAPH = re.compile(r"Pattern \d+, .*\btype (\w+)/\w+")
_NVLINK = re.compile(r"\s*\+ NVL\[|NVLS multicast support is available|NVLS Head")


def _read_fact(message: str, is_warning: bool, log: NcclLog) -> None:
    for form, name in _FIELDS:
        if match := form.match(message):
            setattr(log, name, match[1])
            return
    if match := _LOADED.match(message):
        log.plugin = log.plugin or match[1]
    elif match := _GRAPH.match(message):
        log.intra_host_paths.add(match[1])
    elif match := _ENVIRONMENT.match(message):
        log.environment[match[1]] = match[2]
    elif message.startswith("Connected NVLS tree"):
        log.offloads.add("NVLS")
    elif _NVLINK.match(message):
        log.intra_host_paths.add("NVL")
    elif _NO_PLUGIN.match(message) or (is_warning and "NET/" in message):
        log.complaints[message] = None


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
        if self.path is None or not self.path.is_file():
            return NcclLog()
        with self.path.open("rb") as file:
            return read(self._rest(file).decode(errors="replace"))

    def _rest(self, file: BinaryIO) -> bytes:
        file.seek(self._offset)
        content = file.read()
        self._offset += len(content)
        return content
