"""Catalogues of GPUs (peak FLOP/s, memory) and of cloud instances (GPUs, network), with sources. Loads no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from megabench.errors import near_names
from megabench.precision import POLICIES

# "infiniband" also means RDMA over Ethernet (RoCE), which NCCL uses through the same transport (NET/IB).
Network = Literal["efa", "infiniband", "socket"]


@dataclass(frozen=True)
class Gpu:
    """One type of GPU with its dense peak TFLOP/s (without sparsity) per precision, and its memory.

    `fp8_tflops` is None for GPUs before Hopper, on which megabench does not use fp8. `fp32_tflops` is the peak of fp32
    arithmetic without TF32, because megabench disables TF32 in fp32 runs. `memory_gb_per_s` is the published bandwidth
    of the memory. `like` is the CUDA device name of the GPU of the nearest architecture whose costs are known, or None
    for GPUs with a cost profile of their own.
    """

    name: str
    fp8_tflops: float | None
    bf16_tflops: float | None
    fp16_tflops: float
    fp32_tflops: float
    memory_mib: int
    memory_gb_per_s: float
    source: str
    like: str | None = None

    def peak_tflops(self, precision: str) -> float | None:
        """Return the dense peak TFLOP/s of matrix products in a precision, or None if the GPU lacks the precision."""
        peaks = {"fp8": self.fp8_tflops, "bf16": self.bf16_tflops, "fp16": self.fp16_tflops, "fp32": self.fp32_tflops}
        return peaks.get(POLICIES[precision].products)


_HOPPER = "NVIDIA H100 and H200 datasheets (SXM, dense); both have the same peak FLOP/s"
_H200_NVL, _GH200 = "NVIDIA H200 datasheet (NVL, dense)", "NVIDIA GH200 datasheet (dense)"
_H100_PCIE, _H100_NVL = "NVIDIA H100 datasheet (PCIe, dense)", "NVIDIA H100 datasheet (NVL, dense)"
_AMPERE = "NVIDIA A100 datasheet (dense)"
_VOLTA = "NVIDIA V100 datasheet"
_VERDA = "verda.com/blog/gb300-nvl72-architecture"
_B200 = f"NVIDIA DGX B200 and HGX B200 datasheets (per GPU; half of the sparse FLOP/s); memory bandwidth: {_VERDA}"
_SMI = "memory as nvidia-smi reports it"
_B300 = f"NVIDIA HGX B300 specifications, in glennklockwood.com/garden/processors/B300 (per GPU, dense); {_SMI}"
_GB200 = f"NVIDIA GB200 NVL72 product page (one of 72 GPUs; half of the sparse FLOP/s); {_SMI}"
_GB300 = f"{_VERDA} (per GPU, dense); {_SMI}"

_A100_40, _A100_80, _H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
_H200, _B200_GPU, _B300_GPU = "NVIDIA H200", "NVIDIA B200", "NVIDIA B300 SXM6 AC"
_GB200_GPU, _GB300_GPU = "NVIDIA GB200", "NVIDIA GB300"
_L40S = "NVIDIA L40S"

# The keys are CUDA device names, because variants of one chip may have different peak FLOP/s.
_GPUS = {
    "NVIDIA GB300": Gpu("GB300", 5000.0, 2500.0, 2500.0, 80.0, 284208, 8000.0, _GB300, like=_B200_GPU),
    "NVIDIA GB200": Gpu("GB200", 5000.0, 2500.0, 2500.0, 80.0, 189471, 8000.0, _GB200),
    "NVIDIA B300 SXM6 AC": Gpu("B300", 4500.0, 2250.0, 2250.0, 75.0, 275040, 8000.0, _B300, like=_B200_GPU),
    "NVIDIA B200": Gpu("B200", 4500.0, 2250.0, 2250.0, 75.0, 183359, 7700.0, _B200),
    "NVIDIA H200": Gpu("H200", 1978.9, 989.4, 989.4, 66.9, 144384, 4800.0, _HOPPER),
    "NVIDIA H200 NVL": Gpu("H200 NVL", 1670.9, 835.5, 835.5, 60.0, 144384, 4800.0, _H200_NVL, like=_H200),
    "NVIDIA H100 80GB HBM3": Gpu("H100", 1978.9, 989.4, 989.4, 66.9, 81920, 3350.0, _HOPPER),
    "NVIDIA H100 PCIe": Gpu("H100 PCIe", 1513.0, 756.0, 756.0, 51.2, 81920, 2000.0, _H100_PCIE, like=_H100),
    "NVIDIA H100 NVL": Gpu("H100 NVL", 1670.9, 835.5, 835.5, 60.0, 96256, 3900.0, _H100_NVL, like=_H100),
    "NVIDIA GH200 480GB": Gpu("GH200", 1978.9, 989.4, 989.4, 66.9, 98304, 4000.0, _GH200, like=_H100),
    "NVIDIA A100-SXM4-80GB": Gpu("A100", None, 312.0, 312.0, 19.5, 81920, 2039.0, _AMPERE),
    "NVIDIA A100-SXM4-40GB": Gpu("A100", None, 312.0, 312.0, 19.5, 40960, 1555.0, _AMPERE),
    "NVIDIA A100 80GB PCIe": Gpu("A100 PCIe", None, 312.0, 312.0, 19.5, 81920, 1935.0, _AMPERE, like=_A100_80),
    "NVIDIA A100-PCIE-40GB": Gpu("A100 PCIe", None, 312.0, 312.0, 19.5, 40960, 1555.0, _AMPERE, like=_A100_80),
    "Tesla V100-SXM2-32GB": Gpu("V100", None, None, 125.0, 15.7, 32768, 900.0, _VOLTA, like=_A100_80),
    "Tesla V100-SXM2-16GB": Gpu("V100", None, None, 125.0, 15.7, 16384, 900.0, _VOLTA, like=_A100_80),
    "Tesla V100-PCIE-32GB": Gpu("V100 PCIe", None, None, 112.0, 14.0, 32768, 900.0, _VOLTA, like=_A100_80),
    "Tesla V100-PCIE-16GB": Gpu("V100 PCIe", None, None, 112.0, 14.0, 16384, 900.0, _VOLTA, like=_A100_80),
    "NVIDIA L40S": Gpu("L40S", None, 362.05, 362.05, 91.6, 45776, 864.0, "NVIDIA L40S datasheet (dense)"),
    "NVIDIA L4": Gpu("L4", None, 121.0, 121.0, 30.3, 22888, 300.0, "NVIDIA L4 datasheet (dense)", like=_L40S),
    "NVIDIA A10G": Gpu("A10G", None, 70.0, 70.0, 35.0, 22888, 600.0, "NVIDIA A10G datasheet (dense)", like=_A100_80),
}


GPU_NAMES = tuple(_GPUS)


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU with the CUDA device name `device_name`, or None. The name must match exactly: "NVIDIA H200"."""
    return _GPUS.get(device_name)


def near_gpus(device_name: str) -> list[str]:
    """Return the CUDA device names that a GPU name such as "H100" or "a100 80gb" may mean."""
    words = device_name.lower().replace("-", " ").split()
    return (
        [name for name in _GPUS if words and all(word in name.lower() for word in words)]
        or [name for name, gpu in _GPUS.items() if gpu.name.split()[0].lower() in words]
        or near_names(device_name, _GPUS)
    )


def gpu_memory_mib(device_name: str) -> int | None:
    """Return the memory in MiB of the GPU with this CUDA device name, or None if the name is unknown."""
    gpu = find_gpu(device_name)
    return gpu.memory_mib if gpu else None


@dataclass(frozen=True)
class Instance:
    """One type of cloud instance. `gpu` is the CUDA device name of its GPUs.

    `nvlink_gb_per_s` is the NVLink bandwidth of one GPU in one direction, 0 without NVLink. `nvlink_domain` is the
    number of GPUs per NVLink domain. A domain with more GPUs than an instance has spans several instances.
    `gpudirect` is True if the NICs can read GPU memory directly. The NICs are those between GPUs; NICs for storage and
    management do not count. `source` names the sources of these facts.

    `is_tested` is True if this project measured runs on these GPUs, or fitted its cost model to published runs on these
    GPUs and this kind of network. All other facts and predictions rest on data sheets.
    """

    name: str
    gpu: str
    num_gpus: int
    nvlink_gb_per_s: float
    nvlink_domain: int
    network: Network
    num_nics: int
    nic_gbits: float
    gpudirect: bool
    source: str
    is_tested: bool = False

    @property
    def network_gbits(self) -> float:
        """The total bandwidth of all NICs of the instance in one direction, in Gbit/s."""
        return self.num_nics * self.nic_gbits


# NVLink bandwidths are half of the bidirectional bandwidths in the GPUs' datasheets.
_KARPENTER = "karpenter-provider-aws instance-types.md; awsome-distributed-training efa-cheatsheet.md"
_RDMA = "aws-ofi-nccl #547 (GPUDirect since p4d)"
_EFA = "Amazon EC2 User Guide, Maximize network bandwidth (efa-acc-inst-types)"
_GOOGLE = "Google Compute Engine documentation, Networking and GPU machines (gpu-network-bandwidth)"
_NVL72 = "NVIDIA AI Cluster Runtime, GKE A4X Max (A4X and A4X Max are NVL72 racks with RoCE)"
_AZURE = "Azure virtual machine sizes, series"
_AWS = (
    Instance("p3dn.24xlarge", "Tesla V100-SXM2-32GB", 8, 150.0, 8, "efa", 1, 100.0, False, _KARPENTER),
    Instance("p4d.24xlarge", _A100_40, 8, 300.0, 8, "efa", 4, 100.0, True, f"{_KARPENTER}; {_RDMA}", is_tested=True),
    Instance("p4de.24xlarge", _A100_80, 8, 300.0, 8, "efa", 4, 100.0, True, f"{_KARPENTER}; {_RDMA}", is_tested=True),
    Instance("p5.48xlarge", _H100, 8, 450.0, 8, "efa", 32, 100.0, True, f"{_KARPENTER}; {_RDMA}", is_tested=True),
    # Runs on H200s were measured on one host. Their profile has the EFA constants of the H100 profile.
    Instance("p5e.48xlarge", _H200, 8, 450.0, 8, "efa", 32, 100.0, True, f"{_KARPENTER}; {_RDMA}", is_tested=True),
    Instance("p5en.48xlarge", _H200, 8, 450.0, 8, "efa", 16, 200.0, True, f"{_KARPENTER}; {_RDMA}", is_tested=True),
    Instance("p6-b200.48xlarge", _B200_GPU, 8, 900.0, 8, "efa", 8, 400.0, True, f"{_EFA}, P6-B200; {_RDMA}"),
    Instance("p6-b300.48xlarge", _B300_GPU, 8, 900.0, 8, "efa", 16, 400.0, True, f"{_EFA}, P6-B300; {_RDMA}"),
    # An UltraServer has 18 or 9 of these instances. Two network cards share the 400 Gbit/s of a GPU.
    Instance(
        "p6e-gb200.36xlarge",
        _GB200_GPU,
        4,
        900.0,
        72,
        "efa",
        4,
        400.0,
        True,
        f"{_EFA}, P6e-GB200; Amazon EKS User Guide, P6e-GB200 UltraServers; {_RDMA}",
    ),
    Instance("g5.48xlarge", "NVIDIA A10G", 8, 0.0, 1, "efa", 1, 100.0, False, _KARPENTER),
    Instance("g6.48xlarge", "NVIDIA L4", 8, 0.0, 1, "efa", 1, 100.0, False, _KARPENTER),
    Instance("g6e.48xlarge", "NVIDIA L40S", 8, 0.0, 1, "efa", 4, 100.0, False, _KARPENTER),
)
# NCCL uses TCP on a3-highgpu-8g and a3-megagpu-8g through Google's plugins GPUDirect-TCPX and GPUDirect-TCPXO. The NICs
# write into GPU memory, and the CPU copies no data, so the costs of "infiniband" fit better than those of "socket".
# Without the plugins, NCCL uses ordinary sockets.
_GCP = (
    Instance("a3-highgpu-8g", _H100, 8, 450.0, 8, "infiniband", 4, 200.0, True, f"{_GOOGLE}, A3 High: GPUDirect-TCPX"),
    Instance("a3-megagpu-8g", _H100, 8, 450.0, 8, "infiniband", 8, 200.0, True, f"{_GOOGLE}, A3 Mega: GPUDirect-TCPXO"),
    Instance("a3-ultragpu-8g", _H200, 8, 450.0, 8, "infiniband", 8, 400.0, True, f"{_GOOGLE}, A3 Ultra: RoCE"),
    Instance("a4-highgpu-8g", _B200_GPU, 8, 900.0, 8, "infiniband", 8, 400.0, True, f"{_GOOGLE}, A4: RoCE"),
    Instance("a4x-highgpu-4g", _GB200_GPU, 4, 900.0, 72, "infiniband", 4, 400.0, True, f"{_GOOGLE}, A4X; {_NVL72}"),
    Instance(
        "a4x-maxgpu-4g-metal", _GB300_GPU, 4, 900.0, 72, "infiniband", 4, 800.0, True, f"{_GOOGLE}, A4X Max; {_NVL72}"
    ),
)
_AZURE_TYPES = (
    Instance("Standard_ND96isr_H100_v5", _H100, 8, 450.0, 8, "infiniband", 8, 400.0, True, f"{_AZURE} ND-H100-v5"),
    Instance("Standard_ND96isr_H200_v5", _H200, 8, 450.0, 8, "infiniband", 8, 400.0, True, f"{_AZURE} ND-H200-v5"),
    Instance(
        "Standard_ND128isr_NDR_GB200_v6",
        _GB200_GPU,
        4,
        900.0,
        72,
        "infiniband",
        4,
        400.0,
        True,
        f"{_AZURE} ND-GB200-v6",
    ),
    Instance(
        "Standard_ND128isr_GB300_v6", _GB300_GPU, 4, 900.0, 72, "infiniband", 4, 800.0, True, f"{_AZURE} ND-GB300-v6"
    ),
)
_INSTANCES = {instance.name: instance for instance in (*_AWS, *_GCP, *_AZURE_TYPES)}

INSTANCE_NAMES = tuple(_INSTANCES)
_BY_LOWER_NAME = {name.lower().removeprefix("standard_"): instance for name, instance in _INSTANCES.items()}


def find_instance(name: str) -> Instance | None:
    """Return the catalogue entry for an instance type such as "p5.48xlarge", or None if the type is unknown.

    Upper and lower case are equal, and the prefix "Standard_" of Azure may be missing.
    """
    return _BY_LOWER_NAME.get(name.lower().removeprefix("standard_"))


# UltraServers of AWS: the instance type and the number of instances, which form one NVLink domain.
_ULTRASERVERS = {"u-p6e-gb200x72": ("p6e-gb200.36xlarge", 18), "u-p6e-gb200x36": ("p6e-gb200.36xlarge", 9)}

ULTRASERVER_NAMES = tuple(_ULTRASERVERS)


def find_ultraserver(name: str) -> tuple[Instance, int] | None:
    """Return the instances of an UltraServer such as "u-p6e-gb200x72" and their number, or None if it is unknown."""
    if (found := _ULTRASERVERS.get(name.lower())) is None:
        return None
    instance_type, count = found
    instance = _INSTANCES[instance_type]
    return replace(instance, nvlink_domain=count * instance.num_gpus), count


def near_instances(name: str) -> list[str]:
    """Return the instance types that a name such as "p5", "p5.48xlage" or "8xH100" may mean, UltraServers included."""
    word, names = name.lower(), (*INSTANCE_NAMES, *ULTRASERVER_NAMES)
    on_gpu = {instance.name: gpu.name.lower() for instance in _INSTANCES.values() if (gpu := find_gpu(instance.gpu))}
    gpus = [gpu for gpu in on_gpu.values() if gpu in word]
    longest = max(gpus, key=len, default=None)  # "gb200" also contains "b200"
    return (
        [one for one in names if one.lower().partition(".")[0] == word]
        or [one for one in names if len(word) > 1 and one.lower().removeprefix("standard_").startswith(word)]
        or near_names(name, names, most=1, cutoff=0.85)
        or [one for one in INSTANCE_NAMES if on_gpu.get(one) == longest]
        or near_names(name, names)
    )
