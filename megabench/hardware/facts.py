"""Facts that one process reads about its environment: host, GPU, NVLinks and network. Loads no torch.

GPU facts come from NVML. All other facts come from /sys, /proc and environment variables. A fact that cannot be read
is None or absent.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
from pydantic import BaseModel, ConfigDict

from megabench.hardware.gpus import Network, find_instance
from megabench.runtime.process import host_name

_SYS = Path("/sys")
_NO_INTERFACE = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel")


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GpuFacts(_Facts):
    """One GPU. Bus ids are PCI addresses, which are unique only within one server.

    `nvlinks` contains the remote end of each active NVLink: a GPU's bus id, or None for a switch or an unknown end.
    `nvlinks` is None if NVML does not report NVLinks. `visible_bus_ids` are the bus ids of all GPUs that this process
    can see. `p2p_bus_ids` are the bus ids of the GPUs whose memory this GPU can read directly. `fabric` is the
    (cluster UUID, clique) of an active multi-node NVLink fabric.
    """

    uuid: str
    name: str
    bus_id: str
    nvlinks: tuple[str | None, ...] | None = None
    nvlink_gb_per_s: float | None = None
    visible_bus_ids: tuple[str, ...] = ()
    p2p_bus_ids: tuple[str, ...] = ()
    fabric: tuple[str, int] | None = None


class RankFacts(_Facts):
    """The host, network and GPU of one rank.

    `nccl_hostid` is the environment variable NCCL_HOSTID, which replaces hostname and boot id as NCCL's identity of the
    host. `shm_device` is the device number of /dev/shm. `network_gbits` is the total bandwidth of the NICs.
    `sees_one_gpu` means that CUDA_VISIBLE_DEVICES leaves this process one GPU. `max_connections` is the environment
    variable CUDA_DEVICE_MAX_CONNECTIONS.
    """

    hostname: str
    boot_id: str
    nccl_hostid: str | None = None
    shm_device: int | None = None
    local_rank: int = 0
    instance_type: str | None = None
    network: Network = "socket"
    network_gbits: float | None = None
    gpu: GpuFacts | None = None
    sees_one_gpu: bool = False
    max_connections: str | None = None


def read_facts(local_rank: int, gpu_uuid: str | None) -> RankFacts:
    """Return the facts of this process. `gpu_uuid` is the UUID of the process's GPU ("GPU-…"), or None on CPU."""
    network, gbits = read_network(_SYS)
    return RankFacts(
        hostname=host_name(),
        boot_id=_read(Path("/proc/sys/kernel/random/boot_id")) or "",
        nccl_hostid=os.environ.get("NCCL_HOSTID"),
        shm_device=_device_number("/dev/shm"),
        local_rank=local_rank,
        instance_type=known_instance_type(),
        network=network,
        network_gbits=gbits,
        gpu=read_gpu(gpu_uuid) if gpu_uuid else None,
        sees_one_gpu=len(visible_gpus()) == 1,
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    )


def known_instance_type() -> str | None:
    """Return the cloud instance type of this host, or None if the catalogue does not list the type."""
    name = _read(_SYS / "devices/virtual/dmi/id/product_name")
    return name if name and find_instance(name) else None


def read_network(sys: Path) -> tuple[Network, float | None]:
    """Return the fastest kind of network listed under `sys` (/sys), and the total bandwidth of its NICs in Gbit/s."""
    rates: dict[Network, list[float | None]] = {"efa": [], "infiniband": [], "socket": []}
    for device in _entries(sys / "class/infiniband"):
        driver = device / "device/driver"
        is_efa = driver.exists() and driver.resolve().name == "efa"
        if is_efa or os.environ.get("NCCL_IB_DISABLE") != "1":
            for port in _entries(device / "ports"):
                if is_efa or "ACTIVE" in (_read(port / "state") or ""):
                    rates["efa" if is_efa else "infiniband"].append(_number(_read(port / "rate")))
    for interface in _entries(sys / "class/net"):
        if not interface.name.startswith(_NO_INTERFACE) and _read(interface / "operstate") == "up":
            megabits = _number(_read(interface / "speed"))
            rates["socket"].append(megabits / 1000 if megabits and megabits > 0 else None)
    network: Network = next((kind for kind, found in rates.items() if found), "socket")
    known = [rate for rate in rates[network] if rate]
    return network, sum(known) if known and len(known) == len(rates[network]) else None


@contextmanager
def nvml() -> Iterator[bool]:
    """Initialize NVML for the duration of the context. Yield False if NVML is not available."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> list[tuple[str, str]]:
    """Return the UUID and name of each NVIDIA GPU that a new process would see, in CUDA's order."""
    with nvml() as there:
        if not there:
            return []
        gpus = [(str(pynvml.nvmlDeviceGetUUID(gpu)), str(pynvml.nvmlDeviceGetName(gpu))) for gpu in _gpus()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else seen_by_cuda(gpus, visible)


def gpu_names() -> list[str]:
    """Return the names of the NVIDIA GPUs that a new process would see, or [] without a driver."""
    return [name for _, name in visible_gpus()]


def seen_by_cuda(gpus: Sequence[tuple[str, str]], visible: str) -> list[tuple[str, str]]:
    """Return the (UUID, name) pairs of `gpus` that CUDA_VISIBLE_DEVICES=`visible` selects, ordered as in `visible`."""
    words = [word.strip() for word in visible.split(",")]
    by_index = {str(index): gpu for index, gpu in enumerate(gpus)}
    chosen = []
    for word in words:
        gpu = by_index.get(word) or next((gpu for gpu in gpus if word and gpu[0].startswith(word)), None)
        if gpu is None and word.startswith("MIG-") and gpus:
            gpu = (word, gpus[0][1])  # MIG instance of a GPU of this host
        if gpu is None:
            break  # CUDA ignores all entries after the first invalid entry
        chosen.append(gpu)
    return chosen


def read_gpu(uuid: str) -> GpuFacts | None:
    """Return the facts that NVML reports about one GPU, or None if NVML is missing or does not know the GPU."""
    with nvml() as there:
        if not there or (gpu := ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)) is None:
            return None
        others = {bus_id(other): other for other in _gpus()}
        me = bus_id(gpu)
        return GpuFacts(
            uuid=uuid,
            name=str(pynvml.nvmlDeviceGetName(gpu)),
            bus_id=me,
            nvlinks=_nvlinks(gpu),
            nvlink_gb_per_s=_nvlink_gb_per_s(gpu),
            visible_bus_ids=tuple(others),
            p2p_bus_ids=tuple(address for address, other in others.items() if address != me and _reads(gpu, other)),
            fabric=_fabric(gpu),
        )


def _gpus() -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Call an NVML function and return its result, or None if the GPU or the driver does not support the function."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def bus_id(gpu: Any) -> str:
    """Return the PCI address of a GPU."""
    return _address(pynvml.nvmlDeviceGetPciInfo(gpu))


def _address(pci: Any) -> str:
    """Return a PCI address with an eight-digit domain. NVML pads the domain to four or eight digits."""
    text = pci.busId.decode() if isinstance(pci.busId, bytes) else pci.busId
    domain, rest = text.lower().split(":", 1)
    return f"{int(domain, 16):08x}:{rest}"


def _nvlinks(gpu: Any) -> tuple[str | None, ...] | None:
    states = [ask(pynvml.nvmlDeviceGetNvLinkState, gpu, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    if all(state is None for state in states):
        return None
    return tuple(_remote_gpu(gpu, link) for link, state in enumerate(states) if state == pynvml.NVML_FEATURE_ENABLED)


def _remote_gpu(gpu: Any, link: int) -> str | None:
    kind = ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, gpu, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return None
    pci = ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, gpu, link)
    return _address(pci) if pci is not None else None


def _nvlink_gb_per_s(gpu: Any) -> float | None:
    """Return the total bandwidth of a GPU's active NVLinks in one direction, in GB/s."""
    # NVML returns the speed of one link in MB/s and the number of links.
    fields = [pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT]
    values = ask(pynvml.nvmlDeviceGetFieldValues, gpu, fields)
    if values is None or any(value.nvmlReturn != pynvml.NVML_SUCCESS for value in values):
        return None
    megabytes, num_links = (value.value.uiVal for value in values)
    return megabytes * num_links / 1000 or None


def _reads(gpu: Any, other: Any) -> bool:
    read = 0  # nvidia-ml-py defines the constant NVML_P2P_CAPS_INDEX_READ = 0 as a tuple
    status = ask(pynvml.nvmlDeviceGetP2PStatus, gpu, other, read)
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _fabric(gpu: Any) -> tuple[str, int] | None:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    if ask(pynvml.nvmlDeviceGetGpuFabricInfo, gpu, ctypes.byref(info)) is None:
        return None
    if info.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED:
        return None
    cluster = bytes(info.clusterUuid)
    return (cluster.hex(), info.cliqueId) if any(cluster) else None


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(text: str | None) -> float | None:
    """Return the first word of `text` as a number, e.g. 100 for "100 Gb/sec (4X EDR)"."""
    try:
        return float((text or "").split()[0])
    except (ValueError, IndexError):
        return None


def _device_number(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None
