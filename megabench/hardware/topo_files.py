"""GPUs, NVLinks and NICs of a host, from nvidia-smi topo -m, nvidia-smi nvlink -s or an NCCL topology file.

Loads no torch.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from megabench.hardware.topology import Host, Topology, TopologyError, build, components
from megabench.inputs import LARGE, read_bytes
from megabench.record import NicDistance

NIC_DISTANCES: tuple[NicDistance, ...] = ("switch", "host bridge", "other bridge")  # nearest first
LARGEST_XML = 4 * 2**20  # bytes
MOST_DEVICES = 1024  # GPUs or NICs of an NCCL topology file

# The paths of nvidia-smi topo -m, nearest first.
_PATHS: dict[str, NicDistance] = {
    "PIX": "switch",
    "PXB": "switch",
    "PHB": "host bridge",
    "NODE": "host bridge",
    "SYS": "other bridge",
    "SOC": "other bridge",  # until driver 384
}
_PATH = re.compile(r"\s(?:NV\d+|SYS|SOC|NODE|PHB|PXB|PIX)(?:\s|$)")
_P2P_PATHS = ("PIX", "PXB", "PHB")  # on longer paths between GPUs, NCCL uses host memory instead
_CELL = re.compile(r"X|NV\d+|SYS|SOC|NODE|PHB|PXB|PIX|N/A")
_GPU = re.compile(r"GPU\d+")
_HAS_NVLINKS_IN_LEGEND = re.compile(r"\bNV# *=")
_LEGEND = re.compile(r"^.*?\b(NIC\d+): *(\S+)\s*$")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[[014]?m(?=GPU|\s|$)")  # a pager may remove the escape character


# Outputs of other programs, and of other options of nvidia-smi: a line that only they contain, and the name.
_FOREIGN = (
    (r"ROCm System Management Interface|(?:Weight|Hops|Link Type) between two GPUs", "rocm-smi --showtopo"),
    (r"^(?:ACCESS|WEIGHT|HOPS|LINK TYPE|NUMA BW) TABLE:", "amd-smi topology"),
    (r"^\s*CNS +=|^\s*OK +=|\bGPU\d+(?:\s+(?:X|OK|NS|CNS|GNS|TNS|DR|U))+\s*$", "nvidia-smi topo -p2p"),
    (r"^\s*XL# *=|\bGPU \d+/\d+\b.*\b(?:XL\d|MDF)\b", "xpu-smi topology -m"),
    (r"\bNPU\d+\b.*\bHCCS", "npu-smi info -t topo"),
    (r"\bLink \d+: Remote Device", "nvidia-smi nvlink -R"),
    (r"\bLink \d+, P2P is supported", "nvidia-smi nvlink -c"),
    (r"={5,}NVSMI LOG={5,}", "nvidia-smi -q"),
    (r"^\| NVIDIA-SMI \d", "nvidia-smi without options"),
    (r"^GPU \d+: .*\(UUID: ", "nvidia-smi -L"),
    (r"^Machine \(\d+", "lstopo (hwloc)"),
    (r"^# nThread \d+ nGpus \d+|^#\s+size\s+count\s+type", "nccl-tests without NCCL_DEBUG=INFO"),
    (r"^CA '\w+'\s*$", "ibstat"),
)
_ANY_FOREIGN = re.compile("|".join(f"({form})" for form, _ in _FOREIGN))
_ROOTS = {
    "topology": "lstopo (hwloc)",
    "graphs": "NCCL with NCCL_GRAPH_DUMP_FILE",
    "nvidia_smi_log": "nvidia-smi -q -x",
}

_NVLINK_GPU = re.compile(r"\bGPU (\d+): (.+?) \(UUID: ")
_NVLINK_STATUS = re.compile(
    r"\bLink \d+: (?:(\d+(?:\.\d+)?) GB/s|<inactive>)\s*$|(?i:links are inactive|does not have or support nvlink)"
)


@dataclass(frozen=True)
class HostGpu:
    """A GPU, and the NICs at the smallest distance from it. `path` is nvidia-smi's word for the distance.

    `host` is the number of its host among those of the file. `active` and `inactive` are numbers of NVLinks, if known.
    """

    name: str
    nics: tuple[str, ...] = ()
    distance: NicDistance | None = None
    path: str | None = None
    numa: str | None = None
    host: int = 0
    active: int | None = None
    inactive: int = 0


@dataclass(frozen=True)
class HostFile:
    """The content of a file about one host, or about the hosts of one NVLink domain. The GPUs are sorted by host.

    `domains` contains the indices of the GPUs of each NVLink domain, or is None if the file does not tell. `links`
    contains the NVLink counts between GPUs ("NV18"). `inside` is the link between GPUs of different domains.
    """

    name: str
    kind: Literal["nvidia-smi topo -m", "nvidia-smi nvlink -s", "NCCL topology file", "RCCL topology file"]
    gpus: tuple[HostGpu, ...]
    nics: tuple[str, ...]
    domains: tuple[tuple[int, ...], ...] | None
    links: tuple[str, ...]
    inside: Literal["pcie", "shm"]

    @property
    def sizes(self) -> list[int]:
        """The number of GPUs of each host."""
        counts = Counter(gpu.host for gpu in self.gpus)
        return [counts[host] for host in sorted(counts)]


def topology_of_hosts(files: Sequence[HostFile]) -> Topology:
    """Return the topology of the hosts with one rank per GPU. Raise TopologyError if a file lists no NVLinks."""
    parts = []
    domain_of: list[int] = []
    for file in files:
        if file.domains is None:
            raise TopologyError(f"{file.name}: the file lists no NVLinks. Add the output of nvidia-smi topo -m.")
        network: Literal["efa", "infiniband", "socket"] = "socket"
        if file.nics:
            network = "efa" if all(nic.startswith(("rdmap", "efa")) for nic in file.nics) else "infiniband"
        for number, size in enumerate(file.sizes):
            name = f"{file.name}#{number}" if len(file.sizes) > 1 else file.name
            parts.append((Host(name, "GPU", file.inside, network), size, 1))
        first = max(domain_of, default=-1) + 1
        domain_of += [
            first + next(number for number, domain in enumerate(file.domains) if gpu in domain)
            for gpu in range(len(file.gpus))
        ]
    topology = build(parts)
    return Topology(topology.hosts, topology.host_of, tuple(domain_of), topology.seat_of)


def foreign_source(line: str) -> str | None:
    """Return the program that wrote a line, if it is a program whose output is not read."""
    match = _ANY_FOREIGN.search(line)
    return _FOREIGN[match.lastindex - 1][1] if match and match.lastindex else None


def is_nvlink_line(line: str) -> bool:
    """Return whether a line can be a part of the output of nvidia-smi nvlink -s."""
    return bool(_NVLINK_GPU.search(line) or _NVLINK_STATUS.search(line))


def read_nvlinks(lines: Iterable[str], name: str) -> HostFile | None:
    """Return the GPUs in the output of nvidia-smi nvlink -s, or None if `lines` contain none with a status."""
    states: dict[str, list[int]] = {}  # numbers of active and of inactive links
    has_status, current = False, None
    for line in lines:
        if match := _NVLINK_GPU.search(line):
            current = states.setdefault(f"GPU{match[1]} {match[2]}", [0, 0])
        elif (match := _NVLINK_STATUS.search(line)) and current:
            has_status = True
            current[match[1] is None] += "Link" in match[0]
    if not has_status:
        return None
    gpus = tuple(HostGpu(gpu, active=active, inactive=inactive) for gpu, (active, inactive) in states.items())
    return HostFile(
        name=name,
        kind="nvidia-smi nvlink -s",
        gpus=gpus,
        nics=(),
        domains=None if any(gpu.active for gpu in gpus) else tuple((number,) for number in range(len(gpus))),
        links=tuple(sorted({f"NV{gpu.active}" for gpu in gpus if gpu.active})),
        inside="pcie",
    )


def is_matrix_line(line: str) -> bool:
    """Return whether a line without colours can be a part of the matrix or of its legend of NICs."""
    return bool(
        _GPU.search(line)
        or _LEGEND.match(line)
        or _HAS_NVLINKS_IN_LEGEND.search(line)
        or re.search(r"\s(X|SYS|NODE|PHB|PXB|PIX)\s", line)
    )


def read_matrices(lines: Iterable[str], name: str, other_sources: Collection[str] = ()) -> list[HostFile]:
    """Return the hosts of the matrices in `lines`. Raise TopologyError for a matrix that is incomplete.

    Matrices of `other_sources`, which wrote parts of the file, are left out.
    """
    found: list[list[str]] = []
    for line in lines:
        words = line.split()
        if "GPU0" in words and "X" not in words:
            found.append([])
        if found:
            found[-1].append(line)
    if other_sources:
        found = [matrix for matrix in found if any(_PATH.search(line) for line in matrix[1:] if "=" not in line)]
    return [_read_matrix(matrix, f"{name}#{number}" if len(found) > 1 else name) for number, matrix in enumerate(found)]


def _read_matrix(lines: Sequence[str], name: str) -> HostFile:
    header = lines[0].split()
    header = header[header.index("GPU0") :]
    devices = header[: next((n for n, word in enumerate(header) if word in ("CPU", "NUMA", "GPU")), len(header))]
    rows: dict[str, list[str]] = {}
    legend: dict[str, str] = {}
    for line in lines[1:]:
        if match := _LEGEND.match(line):
            legend[match[1]] = match[2]
            continue
        words = line.split()
        start = next((n for n, word in enumerate(words) if word in devices), None)
        if start is not None and "X" in words[start + 1 :]:
            rows.setdefault(words[start], words[start + 1 :])
    gpus = [device for device in devices if _GPU.fullmatch(device)]
    nics = [device for device in devices if device not in gpus]
    for gpu in gpus:
        cells = rows.get(gpu, [])[: len(devices)]
        if len(cells) < len(devices) or not all(map(_CELL.fullmatch, cells)):
            raise TopologyError(
                f"{name}: the row of {gpu} in the matrix of nvidia-smi topo -m is missing or incomplete. "
                "Save the complete output again."
            )
    path = {(gpu, other): cell for gpu in gpus for other, cell in zip(devices, rows[gpu], strict=False)}
    pairs = list(combinations(range(len(gpus)), 2))
    cells = [path[gpus[a], gpus[b]] for a, b in pairs]
    domains = components(len(gpus), [pair for pair, cell in zip(pairs, cells, strict=True) if cell.startswith("NV")])
    # nvidia-smi topo -mp prints the same matrix without NVLinks. Its legend does not contain NV#.
    is_pci_only = any("= Self" in line for line in lines) and not any(map(_HAS_NVLINKS_IN_LEGEND.search, lines))
    slow = [cell for cell in cells if not cell.startswith("NV")]
    return HostFile(
        name=name,
        kind="nvidia-smi topo -m",
        gpus=tuple(_gpu_of_matrix(gpu, nics, path, legend, header, rows[gpu][len(devices) :]) for gpu in gpus),
        nics=tuple(legend.get(nic, nic) for nic in nics),
        domains=None if is_pci_only else domains,
        links=tuple(sorted({cell for cell in cells if cell.startswith("NV")})),
        inside="pcie" if all(cell in _P2P_PATHS for cell in slow) else "shm",
    )


def _gpu_of_matrix(
    gpu: str,
    nics: Sequence[str],
    path: dict[tuple[str, str], str],
    legend: dict[str, str],
    header: Sequence[str],
    affinity: Sequence[str],
) -> HostGpu:
    known = {nic: path[gpu, nic] for nic in nics if path[gpu, nic] in _PATHS}
    nearest = min(known.values(), key=list(_PATHS).index, default=None)
    return HostGpu(
        name=gpu,
        nics=tuple(legend.get(nic, nic) for nic, cell in known.items() if cell == nearest),
        distance=_PATHS[nearest] if nearest else None,
        path=nearest,
        numa=affinity[1] if "NUMA" in header and len(affinity) > 1 else None,
    )


def parse_nccl_topology(text: str, name: str) -> ElementTree.Element:
    """Return the root of an NCCL topology file. Raise TopologyError if it is none.

    Document type definitions are rejected, because their entities may expand to any size.
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise TopologyError(f"{name}: the file contains a DOCTYPE, which NCCL topology files do not have. Remove it.")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise TopologyError(f"{name}: the XML is malformed ({error}). Write the NCCL topology file again.") from None
    if root.tag != "system":
        source = f", as {_ROOTS[root.tag]} writes it" if root.tag in _ROOTS else ""
        raise TopologyError(
            f"{name}: the root element is <{root.tag[:50]}>{source}, but an NCCL topology file starts with <system>. "
            "Set NCCL_TOPO_DUMP_FILE to let NCCL write one."
        )
    return root


class NcclTopology:
    """The PCIe tree of an NCCL topology file.

    GPUs are nested as system > cpu > pci > … > pci > gpu, NICs as system > cpu > pci > … > pci > nic > net. The files
    of aws-ofi-nccl contain only the PCI devices, whose classes tell GPUs (0x03…) from NICs (0x0200…, 0x0207…).
    """

    def __init__(self, root: ElementTree.Element) -> None:
        self._above = {child: parent for parent in root.iter() for child in parent}
        devices = list(root.iter("pci"))
        with_gpu = [device for device in devices if device.find("gpu") is not None]
        # A management controller's display adapter has a GPU's class too, but NCCL lists no gpu for it.
        self.gpus = with_gpu or [device for device in devices if _class(device).startswith("0x03")]
        self.nics = [element for element in root.iter() if element.tag == "nic" or _is_bare_nic(element)]

    def line(self, element: ElementTree.Element) -> list[ElementTree.Element]:
        """Return the elements from the root to `element`."""
        line = [element]
        while line[-1] in self._above:
            line.append(self._above[line[-1]])
        return line[::-1]

    def distance(self, gpu: ElementTree.Element, nic: ElementTree.Element) -> NicDistance:
        common = [one for one, other in zip(self.line(gpu), self.line(nic), strict=False) if one is other]
        kinds = {element.tag for element in common}
        return "switch" if "pci" in kinds else "host bridge" if "cpu" in kinds else "other bridge"

    def nearest(self, gpu: ElementTree.Element) -> tuple[NicDistance | None, list[ElementTree.Element]]:
        """Return the smallest distance between a GPU and a NIC of its host, and the NICs at this distance."""
        host = self.host(gpu)
        distances = [(self.distance(gpu, nic), nic) for nic in self.nics if self.host(nic) == host]
        smallest = min((distance for distance, _ in distances), key=NIC_DISTANCES.index, default=None)
        return smallest, [nic for distance, nic in distances if distance == smallest]

    def names(self, nic: ElementTree.Element) -> list[str]:
        """Return the names of the network devices of a NIC, or its bus id."""
        names = [net.get("name", "") for net in nic.iter("net")]
        holder = nic if nic.tag == "pci" else self._above.get(nic)
        return [name for name in names if name] or [holder.get("busid", "NIC") if holder is not None else "NIC"]

    def host(self, element: ElementTree.Element) -> str | None:
        """Return the hash of the host, which differs inside a file if NCCL wrote it for a multi-node NVLink domain."""
        return next((above.get("host_hash") for above in self.line(element) if above.tag == "cpu"), None)

    def numa(self, gpu: ElementTree.Element) -> str | None:
        return next((element.get("numaid") for element in self.line(gpu) if element.tag == "cpu"), None)


def _is_bare_nic(element: ElementTree.Element) -> bool:
    """Return whether a PCI device is an Ethernet, EFA or InfiniBand NIC for which the file has no <nic>."""
    return element.tag == "pci" and _class(element).startswith(("0x0200", "0x0207")) and element.find("nic") is None


def _class(device: ElementTree.Element) -> str:
    return (device.get("class") or "").lower()


def read_nccl_topology(text: str, name: str) -> HostFile:
    """Return the hosts of an NCCL topology file. Raise TopologyError if the file is malformed or contains no GPU."""
    root = parse_nccl_topology(text, name)
    tree = NcclTopology(root)
    if not tree.gpus:
        raise TopologyError(f"{name}: the topology file contains no GPU. Write it on a host with GPUs.")
    if max(len(tree.gpus), len(tree.nics)) > MOST_DEVICES:
        raise TopologyError(
            f"{name}: the topology file contains more than {MOST_DEVICES} GPUs or NICs. Use one per rack."
        )
    hosts = list(dict.fromkeys(map(tree.host, tree.gpus)))
    elements = sorted(tree.gpus, key=lambda gpu: hosts.index(tree.host(gpu)))
    place = {(tree.host(gpu), short_bus_id(gpu.get("busid"))): number for number, gpu in enumerate(elements)}
    pairs, counts, on_switch, gpus = [], set(), [], []
    for number, element in enumerate(elements):
        total = 0
        for link in element.iter("nvlink"):
            count = int(link.get("count", "")) if link.get("count", "").isdecimal() else 1
            total += count
            target = place.get((tree.host(element), short_bus_id(link.get("target"))))
            if target is not None:
                pairs.append((number, target))
                counts.add(f"NV{count}")
            elif (link.get("tclass") or "").lower().startswith("0x0680"):  # an NVSwitch
                on_switch.append(number)
        if number in on_switch[-1:]:
            counts.add(f"NV{total}")
        distance, nics = tree.nearest(element)
        host = hosts.index(tree.host(element))
        gpu_name = f"host {host} " * (len(hosts) > 1) + f"GPU{number} {element.get('busid', '')}".rstrip()
        nic_names = tuple(found for nic in nics for found in tree.names(nic))
        gpus.append(HostGpu(gpu_name, nic_names, distance, numa=tree.numa(element), host=host, active=total))
    # NCCL writes several hosts into one file only if NVSwitches connect them (MNNVL).
    pairs += [(on_switch[0], other) for other in on_switch[1:]]
    sockets = {(tree.host(gpu), next((a for a in tree.line(gpu) if a.tag == "cpu"), None)) for gpu in elements}
    is_amd = next(root.iter("xgmi"), None) is not None
    return HostFile(
        name=name,
        kind="RCCL topology file" if is_amd else "NCCL topology file",
        gpus=tuple(gpus),
        nics=tuple(dict.fromkeys(found for nic in tree.nics for found in tree.names(nic))),
        domains=components(len(gpus), pairs) if next(root.iter("nvlink"), None) is not None else None,
        links=tuple(sorted(counts)),
        inside="shm" if len(sockets) > len(hosts) else "pcie",
    )


def distance_in_nccl_topology(file: Path, address: str) -> NicDistance | None:
    """Return the PCIe distance from the GPU to the nearest NIC, computed from a topology file of NCCL."""
    try:
        tree = NcclTopology(parse_nccl_topology(read_bytes(file, LARGE).decode(errors="replace"), str(file)))
    except (OSError, TopologyError):
        return None
    gpus = [gpu for gpu in tree.gpus if short_bus_id(gpu.get("busid")) == short_bus_id(address)]
    return tree.nearest(gpus[0])[0] if gpus else None


def short_bus_id(address: str | None) -> str | None:
    """Return a PCI address with a four-digit domain, the format of Linux, or None if it is no PCI address."""
    domain, colon, rest = (address or "").lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}" if colon else None
    except ValueError:
        return None
