"""What one process can tell about where it runs: host, GPU with its NVLinks, network. Loads no torch.

GPU facts come from NVML, the others from the files of Linux; what cannot be read is None, or absent.
"""

import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
from pydantic import BaseModel, ConfigDict

from megabench.hardware.gpus import Network, find_instance

_SYS = Path("/sys")
_NO_INTERFACE = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel")


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GpuFacts(_Facts):
    """One GPU. Bus ids are PCI addresses, which name a GPU within one server only.

    `nvlinks` holds the remote end of every link that is up: a GPU's bus id, or None for a switch or an end that NVML
    does not tell; it is None itself when NVML tells nothing of links. `visible_bus_ids` are all GPUs that this process
    could see, `p2p_bus_ids` those that this GPU can read directly. `fabric` is (cluster UUID, clique) of a multi-node
    NVLink fabric, once it is up.
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
    """Where one rank runs. `nccl_hostid` is NCCL_HOSTID, which replaces hostname and boot id in NCCL's eyes;
    `shm_device` the device number of /dev/shm; `network_gbits` of all NICs of its network together."""

    hostname: str
    boot_id: str
    nccl_hostid: str | None = None
    shm_device: int | None = None
    local_rank: int = 0
    instance_type: str | None = None
    network: Network = "socket"
    network_gbits: float | None = None
    gpu: GpuFacts | None = None


def read_facts(local_rank: int, gpu_uuid: str | None) -> RankFacts:
    """The facts of this process, which runs on the GPU `gpu_uuid` ("GPU-…"), or on CPU if that is None."""
    network, gbits = read_network(_SYS)
    return RankFacts(
        hostname=socket.gethostname(),
        boot_id=_read(Path("/proc/sys/kernel/random/boot_id")) or "",
        nccl_hostid=os.environ.get("NCCL_HOSTID"),
        shm_device=_device_number("/dev/shm"),
        local_rank=local_rank,
        instance_type=known_instance_type(),
        network=network,
        network_gbits=gbits,
        gpu=read_gpu(gpu_uuid) if gpu_uuid else None,
    )


def known_instance_type() -> str | None:
    """The type of cloud instance that this host is; None for any that the catalogue does not know."""
    name = _read(_SYS / "devices/virtual/dmi/id/product_name")
    return name if name and find_instance(name) else None


def read_network(sys: Path) -> tuple[Network, float | None]:
    """The fastest kind of network that the device files under `sys` show, and its NICs' Gbit/s together."""
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
    """NVML for a while; False where there is none."""
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
    """UUID and name of the NVIDIA GPUs that a process started here would see, in CUDA's order."""
    with nvml() as there:
        if not there:
            return []
        gpus = [(str(pynvml.nvmlDeviceGetUUID(gpu)), str(pynvml.nvmlDeviceGetName(gpu))) for gpu in _gpus()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else seen_by_cuda(gpus, visible)


def seen_by_cuda(gpus: Sequence[tuple[str, str]], visible: str) -> list[tuple[str, str]]:
    """Those of `gpus` (UUID and name) that CUDA_VISIBLE_DEVICES=`visible` lets through, in its order."""
    words = [word.strip() for word in visible.split(",")]
    by_index = {str(index): gpu for index, gpu in enumerate(gpus)}
    chosen = []
    for word in words:
        gpu = by_index.get(word) or next((gpu for gpu in gpus if word and gpu[0].startswith(word)), None)
        if gpu is None and word.startswith("MIG-") and gpus:
            gpu = (word, gpus[0][1])  # a slice of some GPU here
        if gpu is None:
            break  # as CUDA does: what stands behind a wrong word is not seen
        chosen.append(gpu)
    return chosen


def read_gpu(uuid: str) -> GpuFacts | None:
    """What NVML tells of one GPU; None where there is no NVML, or it does not know the GPU."""
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
    """NVML's answer; None where this GPU or driver has none."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def bus_id(gpu: Any) -> str:
    """The PCI address of a GPU."""
    return _address(pynvml.nvmlDeviceGetPciInfo(gpu))


def _address(pci: Any) -> str:
    """A PCI address in one form: NVML pads the domain to four or eight digits."""
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
    """One direction, all links that are up together."""
    fields = [pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT]  # MB/s of a link, links
    values = ask(pynvml.nvmlDeviceGetFieldValues, gpu, fields)
    if values is None or any(value.nvmlReturn != pynvml.NVML_SUCCESS for value in values):
        return None
    megabytes, num_links = (value.value.uiVal for value in values)
    return megabytes * num_links / 1000 or None


def _reads(gpu: Any, other: Any) -> bool:
    read = 0  # NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py gives as a tuple
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
    """The first word of `text` as a number: "100 Gb/sec (4X EDR)" → 100."""
    try:
        return float((text or "").split()[0])
    except (ValueError, IndexError):
        return None


def _device_number(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None
