"""The device of this process, its communication backend, and its properties."""

import os
import resource
import warnings
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from megabench.errors import UserError
from megabench.precision import POLICIES, Dtype, PrecisionPolicy
from megabench.runtime.attention import pin_kernel
from megabench.runtime.process import host_name
from megabench.runtime.rendezvous import Rendezvous, share_of_cores

# torch 2.13 renames these collectives; older supported versions have only the old names
warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated", category=FutureWarning)

_symmetric_bytes = 0

DeviceKind = Literal["cpu", "cuda"]
_DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# the dtype of weights and activations during compute, by precision
DTYPES = {name: _DTYPES[policy.compute] for name, policy in POLICIES.items()}

_HOPPER = (9, 0)  # compute capability


class DeviceError(UserError):
    """Raised if the requested device does not exist."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"], local_world_size: int) -> DeviceKind:
    """Return the kind of device to run on. Raises DeviceError if the kind is `cuda` and there are too few GPUs."""
    num_gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return "cpu"
    # Slurm may show each process only its own GPU; the topology then refuses processes that share one
    sees_own = num_gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if num_gpus < local_world_size and not sees_own:
        found = f"{num_gpus} GPU{'s' * (num_gpus != 1)} for {local_world_size} processes on {host_name()}"
        raise DeviceError(f"device={wanted} found {found}; start one process a GPU, or use --device cpu")
    return "cuda"


def check_precision(policy: PrecisionPolicy, device: DeviceKind) -> None:
    """Raise DeviceError if this machine's GPUs cannot multiply in the policy's precision."""
    if not policy.has_fp8_products or device == "cpu":
        return
    for number in range(torch.cuda.device_count()):
        if torch.cuda.get_device_capability(number) < _HOPPER:
            name = torch.cuda.get_device_name(number)
            raise DeviceError(
                f"precision={policy.name} needs Hopper GPUs or newer ones, but {host_name()} has {name}; use "
                f"precision=bf16"
            )


def gpu_uuid(index: int) -> str:
    """Return the NVML UUID ("GPU-…") of a GPU that this process sees."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def initialize(
    rendezvous: Rendezvous,
    rank: int,
    device: DeviceKind,
    timeout: timedelta = timedelta(minutes=10),
    pins_attention: bool = True,
) -> torch.device:
    """Bind this process to its device and its share of the CPU cores, and create the default process group.

    This process is rank `rank` of the group. The backend is NCCL on GPUs and gloo on CPU. OMP_NUM_THREADS overrides the
    cores. With `pins_attention`, torch tries the fastest attention kernels first.
    """
    torch.set_float32_matmul_precision("highest")  # disable TF32, so that an fp32 run computes in fp32
    if rendezvous.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share_of_cores())
    if device == "cuda":
        where = torch.device("cuda", rendezvous.gpu)
        torch.cuda.set_device(where)
        if pins_attention:
            pin_kernel(where)
    else:
        where = torch.device("cpu")
    if rendezvous.local_world_size == rendezvous.world_size:
        # without other hosts, gloo and NCCL need not listen beyond the loopback interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=rendezvous.base or rendezvous.store,
        rank=rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
        device_id=where if device == "cuda" else None,
    )
    return where


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_gib(device: torch.device) -> float | None:
    """Return the total memory of the GPU in GiB, or None on CPU, where other processes share the memory."""
    return torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None


def count_symmetric_memory(num_bytes: int) -> None:
    """Count more GPU memory, or less, that torch's allocator does not report: symmetric memory."""
    global _symmetric_bytes
    _symmetric_bytes += num_bytes


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far in GiB: reserved by torch's allocators on a GPU, resident set size on CPU."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_reserved(device) + _symmetric_bytes) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
