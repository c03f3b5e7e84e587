"""What a host is like beside the run: shared memory, other processes on its GPUs, clocks, PCIe, compile cache.

Loads no torch. Any of it may be hidden in a container or a virtual machine: what cannot be read is None.
"""

import os
import re
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterable, Mapping, Sequence
from getpass import getuser
from pathlib import Path

import pynvml

from megabench.hardware.facts import ask, bus_id, known_instance_type, nvml
from megabench.record import Machine, NicDistance

_NIC_DISTANCES: tuple[NicDistance, ...] = ("switch", "host bridge", "other bridge")  # near to far

# nvml.h, nvmlClocksEventReasons: those that say a GPU runs slower than it would
_THROTTLE = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]+:[0-9a-f]+")
_FORGETTING_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")  # memory, and the layer that goes with a container


class Checkup:
    """Looks at this rank's host when it is made, and at its GPU's processes again at the end."""

    def __init__(self, host: str, gpu_uuid: str | None, own: Collection[int]) -> None:
        """`own` are the process ids of the run."""
        self._gpu_uuid, self._own = gpu_uuid, own
        shm = read_shm(Path("/dev/shm"))
        cache = compile_cache(os.environ)
        self._seen = Machine(
            host=host,
            instance_type=known_instance_type(),
            shm_total_gib=shm[0] if shm else None,
            shm_free_gib=shm[1] if shm else None,
            compile_cache=str(cache),
            is_compile_cache_kept=is_kept(cache, Path("/proc/self/mounts")),
            nic_distance=read_nic_distance(gpu_uuid) if gpu_uuid else None,
            power_limit_share=power_limit_share(gpu_uuid) if gpu_uuid else None,
        )
        self._look()

    def _look(self) -> None:
        processes = other_processes(self._gpu_uuid, self._own) if self._gpu_uuid else None
        if processes and processes[0] >= (self._seen.num_other_gpu_processes or 0):
            number, gib = processes
            update = {"num_other_gpu_processes": number, "other_gpu_processes_gib": gib}
            self._seen = self._seen.model_copy(update=update)

    def close(self, throttle: Mapping[str, float] | None) -> Machine:
        """What was seen, with the `throttle` that the timed steps had."""
        self._look()
        return self._seen.model_copy(update={"throttle": dict(throttle) if throttle is not None else None})


def worst_of_hosts(seen: Iterable[Machine]) -> list[Machine]:
    """One for each host out of what its ranks saw: the worst of everything."""
    hosts: dict[str, Machine] = {}
    for machine in seen:
        known = hosts.get(machine.host)
        hosts[machine.host] = _worse(known, machine) if known else machine
    return list(hosts.values())


def _worse(a: Machine, b: Machine) -> Machine:
    most = max((a, b), key=lambda machine: machine.num_other_gpu_processes or 0)
    reasons = None
    if a.throttle is not None or b.throttle is not None:
        one, other = a.throttle or {}, b.throttle or {}
        reasons = {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in (one | other)}
    distances = [machine.nic_distance for machine in (a, b) if machine.nic_distance]
    limits = [machine.power_limit_share for machine in (a, b) if machine.power_limit_share is not None]
    return a.model_copy(
        update={
            "num_other_gpu_processes": most.num_other_gpu_processes,
            "other_gpu_processes_gib": most.other_gpu_processes_gib,
            "throttle": reasons,
            "nic_distance": max(distances, key=_NIC_DISTANCES.index, default=None),
            "power_limit_share": min(limits, default=None),
        }
    )


def read_shm(folder: Path) -> tuple[float, float] | None:
    """GiB of shared memory in all, and free."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize / 2**30, found.f_bavail * found.f_frsize / 2**30


def other_processes(gpu_uuid: str, own: Collection[int]) -> tuple[int, float | None] | None:
    """How many processes compute on a GPU beside the run's `own`, and the GiB that they hold."""
    with nvml() as there:
        gpu = ask(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid) if there else None
        found = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu) if gpu is not None else None
    return None if found is None else beside_us({process.pid: process.usedGpuMemory for process in found}, own)


def beside_us(memory: Mapping[int, int | None], own: Collection[int]) -> tuple[int, float | None]:
    """The number and the GiB of the processes in `memory` (bytes by process id) that are not `own`.

    In a container NVML tells the host's numbers, or none: then one of them is the run's, and nobody knows which.
    """
    if not memory.keys() & set(own):
        return max(0, len(memory) - 1), None
    others = [num_bytes for pid, num_bytes in memory.items() if pid not in own]
    known = [num_bytes for num_bytes in others if num_bytes is not None]
    return len(others), sum(known) / 2**30 if len(known) == len(others) else None


def throttle_reasons(gpu_uuid: str) -> frozenset[str] | None:
    """Why a GPU now runs slower than it would; empty when it does not."""
    with nvml() as there:
        gpu = ask(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid) if there else None
        if gpu is None:
            return None
        bits = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu)
        if bits is None:  # a driver that knows the older name alone
            bits = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    return None if bits is None else frozenset(name for bit, name in _THROTTLE.items() if bits & bit)


def shares(samples: Sequence[frozenset[str]]) -> dict[str, float]:
    """In which part of the samples each reason was seen."""
    names = sorted(set().union(*samples))
    return {name: sum(name in sample for sample in samples) / len(samples) for name in names}


def power_limit_share(gpu_uuid: str) -> float | None:
    """The power limit that is set, as a part of the one that the GPU came with."""
    with nvml() as there:
        gpu = ask(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid) if there else None
        if gpu is None:
            return None
        limit = ask(pynvml.nvmlDeviceGetPowerManagementLimit, gpu)
        default = ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu)
    return limit / default if limit and default else None


def compile_cache(environment: Mapping[str, str]) -> Path:
    """Where torch.compile keeps what it made."""
    if folder := environment.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(folder)
    try:
        user = getuser()
    except (KeyError, OSError):  # a user number without a name, as containers have
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def is_kept(folder: Path, mounts: Path) -> bool | None:
    """Whether `folder` lies on a file system that outlives a container and a restart; `mounts` is /proc/self/mounts."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    around = [words for words in lines if len(words) > 2 and folder.is_relative_to(words[1])]
    if not around:
        return None
    innermost = max(reversed(around), key=lambda words: len(words[1]))
    return innermost[2] not in _FORGETTING_FILE_SYSTEMS


def read_nic_distance(gpu_uuid: str) -> NicDistance | None:
    """How far the GPU is from the nearest NIC that reads memory itself (InfiniBand, RoCE, EFA)."""
    with nvml() as there:
        gpu = ask(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid) if there else None
        address = bus_id(gpu) if gpu is not None else None
    if address is None:
        return None
    files = [os.environ.get(variable) for variable in ("NCCL_TOPO_DUMP_FILE", "NCCL_TOPO_FILE")]
    for file in files:
        if file and (distance := distance_in_nccl_topology(Path(file), address)):
            return distance
    # a virtual machine shows a PCIe tree of its own making
    return None if is_virtual(Path("/proc/cpuinfo")) else distance_in_sys(Path("/sys"), address)


def is_virtual(cpuinfo: Path) -> bool:
    """Whether this is a virtual machine, by the flag that processors show there."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and "hypervisor" in line.split() for line in lines)


def distance_in_sys(sys: Path, address: str) -> NicDistance | None:
    """From the device files: what the paths of the GPU and of a NIC have in common, the nearest NIC counting.

    A path goes through the host bridge and the PCIe bridges to the device: …/pci0000:3a/0000:3a:00.0/0000:3b:00.0.
    """
    gpu = _pci_path(sys / "bus/pci/devices" / _short(address))
    try:
        nics = sorted((sys / "class/infiniband").iterdir())
    except OSError:
        return None
    found = [_distance(gpu, path) for nic in nics if gpu and (path := _pci_path(nic / "device"))]
    return min(found, key=_NIC_DISTANCES.index, default=None)


def _pci_path(device: Path) -> tuple[str, ...] | None:
    """The host bridge, the bridges and the device itself."""
    if not device.exists():
        return None
    parts = device.resolve().parts
    bridge = next((number for number, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), None)
    return parts[bridge:] if bridge is not None else None


def _distance(a: tuple[str, ...], b: tuple[str, ...]) -> NicDistance:
    num_common = next(
        (n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b))
    )
    return "other bridge" if num_common == 0 else "host bridge" if num_common == 1 else "switch"


def _short(address: str) -> str:
    """A PCI address with the four digits of domain that Linux writes."""
    domain, rest = address.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def distance_in_nccl_topology(file: Path, address: str) -> NicDistance | None:
    """From a topology that NCCL wrote or was given: system > cpu > pci > … > pci > gpu, and nic > net beside it."""
    try:
        root = ElementTree.parse(file).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    above: dict[ElementTree.Element, ElementTree.Element] = {
        child: parent for parent in root.iter() for child in parent
    }

    def path(element: ElementTree.Element) -> list[ElementTree.Element]:
        line = [element]
        while line[0] in above:
            line.insert(0, above[line[0]])
        return line

    gpus = [
        element for element in root.iter("pci") if _same_address(element.get("busid"), address) and _holds_gpu(element)
    ]
    nics = list(root.iter("nic"))
    if not gpus or not nics:
        return None
    return min((_distance_of_lines(path(gpus[0]), path(nic)) for nic in nics), key=_NIC_DISTANCES.index)


def _holds_gpu(element: ElementTree.Element) -> bool:
    return element.find("gpu") is not None or (element.get("class") or "").startswith("0x03")


def _distance_of_lines(a: Sequence[ElementTree.Element], b: Sequence[ElementTree.Element]) -> NicDistance:
    common = [one for one, other in zip(a, b, strict=False) if one is other]
    kinds = {element.tag for element in common}
    return "switch" if "pci" in kinds else "host bridge" if "cpu" in kinds else "other bridge"


def _same_address(text: str | None, address: str) -> bool:
    try:
        return text is not None and _short(text) == _short(address)
    except ValueError:
        return False
