"""Catalogues of GPUs (peak FLOP/s, memory) and of cloud instances (GPUs, network), with sources. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

from megabench.precision import POLICIES

Network = Literal["efa", "infiniband", "socket"]


@dataclass(frozen=True)
class Gpu:
    """One type of GPU with its dense peak TFLOP/s (without sparsity) per precision.

    `fp8_tflops` is None for GPUs before Hopper, on which megabench does not use fp8. `fp32_tflops` is the peak of fp32
    arithmetic without TF32, because megabench disables TF32 in fp32 runs.
    """

    name: str
    fp8_tflops: float | None
    bf16_tflops: float | None
    fp16_tflops: float
    fp32_tflops: float
    source: str

    def peak_tflops(self, precision: str) -> float | None:
        """Return the dense peak TFLOP/s of matrix products in a precision, or None if the GPU lacks the precision."""
        peaks = {"fp8": self.fp8_tflops, "bf16": self.bf16_tflops, "fp16": self.fp16_tflops, "fp32": self.fp32_tflops}
        return peaks.get(POLICIES[precision].products)


_HOPPER = "NVIDIA H100 datasheet (SXM, dense); the H200 has the same peak FLOP/s"
_AMPERE = "NVIDIA A100 datasheet (dense)"
_VOLTA = "NVIDIA V100 datasheet"

# The keys are CUDA device names, because variants of one chip may have different peak FLOP/s.
_GPUS = {
    "NVIDIA H200": Gpu("H200", 1978.9, 989.4, 989.4, 66.9, _HOPPER),
    "NVIDIA H200 NVL": Gpu("H200 NVL", 1670.9, 835.5, 835.5, 60.0, "NVIDIA H200 datasheet (NVL, dense)"),
    "NVIDIA H100 80GB HBM3": Gpu("H100", 1978.9, 989.4, 989.4, 66.9, _HOPPER),
    "NVIDIA H100 PCIe": Gpu("H100 PCIe", 1513.0, 756.0, 756.0, 51.2, "NVIDIA H100 datasheet (PCIe, dense)"),
    "NVIDIA H100 NVL": Gpu("H100 NVL", 1670.9, 835.5, 835.5, 60.0, "NVIDIA H100 datasheet (NVL, dense)"),
    "NVIDIA GH200 480GB": Gpu("GH200", 1978.9, 989.4, 989.4, 66.9, "NVIDIA GH200 datasheet (dense)"),
    "NVIDIA B200": Gpu("B200", 4500.0, 2250.0, 2250.0, 75.0, "NVIDIA DGX B200 datasheet (per GPU, dense)"),
    "NVIDIA A100-SXM4-80GB": Gpu("A100", None, 312.0, 312.0, 19.5, _AMPERE),
    "NVIDIA A100-SXM4-40GB": Gpu("A100", None, 312.0, 312.0, 19.5, _AMPERE),
    "NVIDIA A100 80GB PCIe": Gpu("A100 PCIe", None, 312.0, 312.0, 19.5, _AMPERE),
    "NVIDIA A100-PCIE-40GB": Gpu("A100 PCIe", None, 312.0, 312.0, 19.5, _AMPERE),
    "Tesla V100-SXM2-32GB": Gpu("V100", None, None, 125.0, 15.7, _VOLTA),
    "Tesla V100-SXM2-16GB": Gpu("V100", None, None, 125.0, 15.7, _VOLTA),
    "Tesla V100-PCIE-32GB": Gpu("V100 PCIe", None, None, 112.0, 14.0, _VOLTA),
    "Tesla V100-PCIE-16GB": Gpu("V100 PCIe", None, None, 112.0, 14.0, _VOLTA),
    "NVIDIA L40S": Gpu("L40S", None, 362.05, 362.05, 91.6, "NVIDIA L40S datasheet (dense)"),
    "NVIDIA L4": Gpu("L4", None, 121.0, 121.0, 30.3, "NVIDIA L4 datasheet (dense)"),
    "NVIDIA A10G": Gpu("A10G", None, 70.0, 70.0, 35.0, "NVIDIA A10G datasheet (dense)"),
}


GPU_NAMES = tuple(_GPUS)


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU with the CUDA device name `device_name`, or None. The name must match exactly: "NVIDIA H200"."""
    return _GPUS.get(device_name)


@dataclass(frozen=True)
class Instance:
    """One type of cloud instance. `gpu` is the CUDA device name of its GPUs.

    `nvlink_gb_per_s` is the NVLink bandwidth of one GPU in one direction, 0 without NVLink. `nvlink_domain` is the
    number of GPUs per NVLink domain. `gpudirect` is True if the NICs can read GPU memory directly. AWS P instances
    support GPUDirect since p4d (aws-ofi-nccl #547).
    """

    name: str
    gpu: str
    num_gpus: int
    gpu_memory_mib: int
    nvlink_gb_per_s: float
    nvlink_domain: int
    network: Network
    num_nics: int
    nic_gbits: float
    gpudirect: bool
    num_vcpus: int

    @property
    def network_gbits(self) -> float:
        """The total bandwidth of all NICs of the instance in one direction, in Gbit/s."""
        return self.num_nics * self.nic_gbits


# Sources: karpenter-provider-aws instance-types.md, awsome-distributed-training efa-cheatsheet.md. NVLink bandwidths
# are from the GPUs' datasheets.
_A100_40, _A100_80 = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"
_INSTANCES = {
    instance.name: instance
    for instance in (
        Instance("p3dn.24xlarge", "Tesla V100-SXM2-32GB", 8, 32768, 150.0, 8, "efa", 1, 100.0, False, 96),
        Instance("p4d.24xlarge", _A100_40, 8, 40960, 300.0, 8, "efa", 4, 100.0, True, 96),
        Instance("p4de.24xlarge", _A100_80, 8, 81920, 300.0, 8, "efa", 4, 100.0, True, 96),
        Instance("p5.48xlarge", "NVIDIA H100 80GB HBM3", 8, 81920, 450.0, 8, "efa", 32, 100.0, True, 192),
        Instance("p5e.48xlarge", "NVIDIA H200", 8, 144384, 450.0, 8, "efa", 32, 100.0, True, 192),
        Instance("p5en.48xlarge", "NVIDIA H200", 8, 144384, 450.0, 8, "efa", 16, 200.0, True, 192),
        Instance("p6-b200.48xlarge", "NVIDIA B200", 8, 183359, 900.0, 8, "efa", 8, 400.0, True, 192),
        Instance("g5.48xlarge", "NVIDIA A10G", 8, 22888, 0.0, 1, "efa", 1, 100.0, False, 192),
        Instance("g6.48xlarge", "NVIDIA L4", 8, 22888, 0.0, 1, "efa", 1, 100.0, False, 192),
        Instance("g6e.48xlarge", "NVIDIA L40S", 8, 45776, 0.0, 1, "efa", 4, 100.0, False, 192),
    )
}

INSTANCE_NAMES = tuple(_INSTANCES)


def find_instance(name: str) -> Instance | None:
    """Return the catalogue entry for an instance type such as "p5.48xlarge", or None if the type is unknown."""
    return _INSTANCES.get(name)


# The memory of GPUs that are in no instance of _INSTANCES, from the GPUs' datasheets.
_MEMORY_MIB = {
    "NVIDIA H200 NVL": 144384,
    "NVIDIA H100 PCIe": 81920,
    "NVIDIA H100 NVL": 96256,
    "NVIDIA GH200 480GB": 98304,
    "NVIDIA A100 80GB PCIe": 81920,
    "NVIDIA A100-PCIE-40GB": 40960,
    "Tesla V100-SXM2-16GB": 16384,
    "Tesla V100-PCIE-32GB": 32768,
    "Tesla V100-PCIE-16GB": 16384,
}


def gpu_memory_mib(device_name: str) -> int | None:
    """Return the memory in MiB of the GPU with this CUDA device name, or None if the name is unknown."""
    found = (instance.gpu_memory_mib for instance in _INSTANCES.values() if instance.gpu == device_name)
    return next(found, _MEMORY_MIB.get(device_name))
