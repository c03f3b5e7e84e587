"""Condition of a host during a run: shared memory, other GPU processes, throttling, PCIe distance, compile cache.

Loads no torch. A container or a virtual machine may hide some of the values. A value that cannot be read is None.
"""

import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from getpass import getuser
from pathlib import Path

import pynvml

from megabench.hardware.facts import ask, bus_id, known_instance_type, nvml
from megabench.hardware.topo_files import NIC_DISTANCES, distance_in_nccl_topology, short_bus_id
from megabench.record import Machine, NicDistance

# The bits of nvmlClocksEventReasons (nvml.h) that indicate throttling, i.e. clocks below their usual value.
_THROTTLE = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]+:[0-9a-f]+")
# These file systems lose their files: tmpfs and ramfs are in memory, and an overlay is deleted with its container.
_FORGETTING_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")


class Checkup:
    """Record the condition of this rank's host. Other processes on the GPU are counted at the start and at the end."""

    def __init__(self, host: str, gpu_uuid: str | None, own: Collection[int]) -> None:
        """Read the condition of the host. `own` contains the process ids of the run."""
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
        """Return the recorded condition. `throttle` maps each throttle reason to its share of the samples, 0 to 1."""
        self._look()
        return self._seen.model_copy(update={"throttle": dict(throttle) if throttle is not None else None})


def worst_of_hosts(seen: Iterable[Machine]) -> list[Machine]:
    """Return one Machine per host. Each GPU field contains the worst value that any rank of the host recorded."""
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
            "nic_distance": max(distances, key=NIC_DISTANCES.index, default=None),
            "power_limit_share": min(limits, default=None),
        }
    )


def read_shm(folder: Path) -> tuple[float, float] | None:
    """Return the total and the free shared memory of the file system at `folder`, in GiB."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize / 2**30, found.f_bavail * found.f_frsize / 2**30


def other_processes(gpu_uuid: str, own: Collection[int]) -> tuple[int, float | None] | None:
    """Return the number of other processes on a GPU and their memory in GiB. `own` lists the run's own process ids."""
    with nvml() as there:
        gpu = ask(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid) if there else None
        found = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu) if gpu is not None else None
    return None if found is None else beside_us({process.pid: process.usedGpuMemory for process in found}, own)


def beside_us(memory: Mapping[int, int | None], own: Collection[int]) -> tuple[int, float | None]:
    """Return the number and the GPU memory in GiB of the processes in `memory` that are not in `own`.

    `memory` maps process ids to bytes. In a container, NVML may report the host's process ids or none. If `memory`
    contains no process id of this run, one unknown entry is assumed to be this run's, and the GPU memory is None.
    """
    if not memory.keys() & set(own):
        return max(0, len(memory) - 1), None
    others = [num_bytes for pid, num_bytes in memory.items() if pid not in own]
    known = [num_bytes for num_bytes in others if num_bytes is not None]
    return len(others), sum(known) / 2**30 if len(known) == len(others) else None


def throttle_reasons(gpu_uuid: str) -> frozenset[str] | None:
    """Return the reasons why a GPU currently runs below its usual clocks, or an empty set without throttling."""
    with nvml() as there:
        gpu = ask(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid) if there else None
        if gpu is None:
            return None
        bits = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu)
        if bits is None:  # Older drivers support only the older NVML function.
            bits = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    return None if bits is None else frozenset(name for bit, name in _THROTTLE.items() if bits & bit)


def shares(samples: Sequence[frozenset[str]]) -> dict[str, float]:
    """Return the share of the samples, 0 to 1, that contain each throttle reason."""
    names = sorted(set().union(*samples))
    return {name: sum(name in sample for sample in samples) / len(samples) for name in names}


def power_limit_share(gpu_uuid: str) -> float | None:
    """Return the GPU's current power limit divided by its default power limit."""
    with nvml() as there:
        gpu = ask(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid) if there else None
        if gpu is None:
            return None
        limit = ask(pynvml.nvmlDeviceGetPowerManagementLimit, gpu)
        default = ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu)
    return limit / default if limit and default else None


def compile_cache(environment: Mapping[str, str]) -> Path:
    """Return the directory of torch.compile's cache."""
    if folder := environment.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(folder)
    try:
        user = getuser()
    except (KeyError, OSError):  # In a container, the user id may have no user name.
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def is_kept(folder: Path, mounts: Path) -> bool | None:
    """Return whether files in `folder` survive a restart of the container or the host.

    `mounts` is the path of /proc/self/mounts.
    """
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
    """Return the PCIe distance from the GPU to the nearest RDMA NIC (InfiniBand, RoCE, EFA)."""
    with nvml() as there:
        gpu = ask(pynvml.nvmlDeviceGetHandleByUUID, gpu_uuid) if there else None
        address = bus_id(gpu) if gpu is not None else None
    if address is None:
        return None
    files = [os.environ.get(variable) for variable in ("NCCL_TOPO_DUMP_FILE", "NCCL_TOPO_FILE")]
    for file in files:
        if file and (distance := distance_in_nccl_topology(Path(file), address)):
            return distance
    # The PCIe tree of a virtual machine is emulated and differs from the PCIe tree of the hardware.
    return None if is_virtual(Path("/proc/cpuinfo")) else distance_in_sys(Path("/sys"), address)


def is_virtual(cpuinfo: Path) -> bool:
    """Return whether this host is a virtual machine, i.e. whether /proc/cpuinfo lists the flag "hypervisor"."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and "hypervisor" in line.split() for line in lines)


def distance_in_sys(sys: Path, address: str) -> NicDistance | None:
    """Return the PCIe distance from the GPU to the nearest NIC, computed from the device paths under `sys`.

    A device path contains the host bridge, the PCIe bridges and the device: …/pci0000:3a/0000:3a:00.0/0000:3b:00.0.
    The part that the paths of the GPU and of a NIC have in common determines the distance.
    """
    gpu = _pci_path(sys / "bus/pci/devices" / (short_bus_id(address) or address))
    try:
        nics = sorted((sys / "class/infiniband").iterdir())
    except OSError:
        return None
    found = [_distance(gpu, path) for nic in nics if gpu and (path := _pci_path(nic / "device"))]
    return min(found, key=NIC_DISTANCES.index, default=None)


def _pci_path(device: Path) -> tuple[str, ...] | None:
    """Return the PCI path of a device: the host bridge, the PCIe bridges and the device."""
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
