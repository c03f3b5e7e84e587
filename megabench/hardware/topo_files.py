"""GPUs, NVLinks and NICs of a host, from the output of nvidia-smi topo -m or from an NCCL topology file.

Loads no torch.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from megabench.hardware.topology import Host, Topology, TopologyError, build, components
from megabench.record import NicDistance

NIC_DISTANCES: tuple[NicDistance, ...] = ("switch", "host bridge", "other bridge")  # nearest first
LARGEST_XML = 4 * 2**20  # bytes

# The paths of nvidia-smi topo -m, nearest first.
_PATHS: dict[str, NicDistance] = {
    "PIX": "switch",
    "PXB": "switch",
    "PHB": "host bridge",
    "NODE": "host bridge",
    "SYS": "other bridge",
}
_P2P_PATHS = ("PIX", "PXB", "PHB")  # on longer paths between GPUs, NCCL uses host memory instead
_CELL = re.compile(r"X|NV\d+|SYS|NODE|PHB|PXB|PIX|N/A")
_GPU = re.compile(r"GPU\d+")
_LEGEND = re.compile(r"^.*?\b(NIC\d+): *(\S+)\s*$")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[[014]?m(?=GPU|\s|$)")  # a pager may remove the escape character


@dataclass(frozen=True)
class HostGpu:
    """A GPU, and the NICs at the smallest distance from it. `path` is nvidia-smi's word for the distance."""

    name: str
    nics: tuple[str, ...]
    distance: NicDistance | None
    path: str | None = None
    numa: str | None = None


@dataclass(frozen=True)
class HostFile:
    """The content of a file about one host.

    `domains` contains the indices of the GPUs of each NVLink domain, or is None if the file does not tell. `links`
    contains the NVLink counts between GPUs ("NV18"). `inside` is the link between GPUs of different domains.
    """

    name: str
    kind: Literal["nvidia-smi topo -m", "NCCL topology file"]
    gpus: tuple[HostGpu, ...]
    nics: tuple[str, ...]
    domains: tuple[tuple[int, ...], ...] | None
    links: tuple[str, ...]
    inside: Literal["pcie", "shm"]


def topology_of_hosts(hosts: Sequence[HostFile]) -> Topology:
    """Return the topology of the hosts with one rank per GPU. Raise TopologyError if a file lists no NVLinks."""
    parts = []
    domain_of: list[int] = []
    for host in hosts:
        if host.domains is None:
            raise TopologyError(f"{host.name}: the file lists no NVLinks. Add the output of nvidia-smi topo -m.")
        network: Literal["efa", "infiniband", "socket"] = "socket"
        if host.nics:
            network = "efa" if all(nic.startswith(("rdmap", "efa")) for nic in host.nics) else "infiniband"
        parts.append((Host(host.name, "GPU", host.inside, network), len(host.gpus), 1))
        first = max(domain_of, default=-1) + 1
        domain_of += [
            first + next(number for number, domain in enumerate(host.domains) if gpu in domain)
            for gpu in range(len(host.gpus))
        ]
    topology = build(parts)
    return Topology(topology.hosts, topology.host_of, tuple(domain_of), topology.seat_of)


def is_matrix_line(line: str) -> bool:
    """Return whether a line without colours can be a part of the matrix or of its legend of NICs."""
    return bool(_GPU.search(line) or _LEGEND.match(line) or re.search(r"\s(X|SYS|NODE|PHB|PXB|PIX)\s", line))


def read_matrices(lines: Iterable[str], name: str) -> list[HostFile]:
    """Return the hosts of the matrices in `lines`. Raise TopologyError for a matrix that is incomplete."""
    found: list[list[str]] = []
    for line in lines:
        words = line.split()
        if "GPU0" in words and "X" not in words:
            found.append([])
        if found:
            found[-1].append(line)
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
    slow = [cell for cell in cells if not cell.startswith("NV")]
    return HostFile(
        name=name,
        kind="nvidia-smi topo -m",
        gpus=tuple(_gpu_of_matrix(gpu, nics, path, legend, header, rows[gpu][len(devices) :]) for gpu in gpus),
        nics=tuple(legend.get(nic, nic) for nic in nics),
        domains=domains,
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
        raise TopologyError(
            f"{name}: the root element is <{root.tag[:50]}>, but an NCCL topology file starts with <system>. "
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
        """Return the smallest distance between a GPU and a NIC, and the NICs at this distance."""
        distances = [(self.distance(gpu, nic), nic) for nic in self.nics]
        smallest = min((distance for distance, _ in distances), key=NIC_DISTANCES.index, default=None)
        return smallest, [nic for distance, nic in distances if distance == smallest]

    def names(self, nic: ElementTree.Element) -> list[str]:
        """Return the names of the network devices of a NIC, or its bus id."""
        names = [net.get("name", "") for net in nic.iter("net")]
        holder = nic if nic.tag == "pci" else self._above.get(nic)
        return [name for name in names if name] or [holder.get("busid", "NIC") if holder is not None else "NIC"]

    def numa(self, gpu: ElementTree.Element) -> str | None:
        return next((element.get("numaid") for element in self.line(gpu) if element.tag == "cpu"), None)


def _is_bare_nic(element: ElementTree.Element) -> bool:
    """Return whether a PCI device is an Ethernet, EFA or InfiniBand NIC for which the file has no <nic>."""
    return element.tag == "pci" and _class(element).startswith(("0x0200", "0x0207")) and element.find("nic") is None


def _class(device: ElementTree.Element) -> str:
    return (device.get("class") or "").lower()


def read_nccl_topology(text: str, name: str) -> HostFile:
    """Return the host of an NCCL topology file. Raise TopologyError if the file is malformed or contains no GPU."""
    root = parse_nccl_topology(text, name)
    tree = NcclTopology(root)
    if not tree.gpus:
        raise TopologyError(f"{name}: the topology file contains no GPU. Write it on a host with GPUs.")
    buses = [short_bus_id(gpu.get("busid")) for gpu in tree.gpus]
    pairs, counts, on_switch = [], set(), []
    for number, gpu in enumerate(tree.gpus):
        total = 0
        for link in gpu.iter("nvlink"):
            total += int(link.get("count", "")) if link.get("count", "").isdecimal() else 1
            target = short_bus_id(link.get("target"))
            if target in buses:
                pairs.append((number, buses.index(target)))
                counts.add(f"NV{link.get('count', '?')}")
            elif (link.get("tclass") or "").lower().startswith("0x0680"):  # an NVSwitch
                on_switch.append(number)
        if number in on_switch:
            counts.add(f"NV{total}")
    pairs += [(on_switch[0], other) for other in on_switch[1:]]
    gpus = []
    for number, gpu in enumerate(tree.gpus):
        distance, nics = tree.nearest(gpu)
        names = tuple(found for nic in nics for found in tree.names(nic))
        gpus.append(HostGpu(f"GPU{number} {gpu.get('busid', '')}".rstrip(), names, distance, numa=tree.numa(gpu)))
    kinds = [tree.distance(tree.gpus[a], tree.gpus[b]) for a, b in combinations(range(len(gpus)), 2)]
    return HostFile(
        name=name,
        kind="NCCL topology file",
        gpus=tuple(gpus),
        nics=tuple(found for nic in tree.nics for found in tree.names(nic)),
        domains=components(len(gpus), pairs) if next(root.iter("nvlink"), None) is not None else None,
        links=tuple(sorted(counts)),
        inside="shm" if "other bridge" in kinds else "pcie",
    )


def distance_in_nccl_topology(file: Path, address: str) -> NicDistance | None:
    """Return the PCIe distance from the GPU to the nearest NIC, computed from a topology file of NCCL."""
    try:
        tree = NcclTopology(parse_nccl_topology(file.read_text(errors="replace"), str(file)))
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
