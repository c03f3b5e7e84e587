"""GPUs with their peak rates; every fact with its source. Loads no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One accelerator: dense peak in TFLOP/s by precision (no sparsity), memory in GiB.

    `fp32` is the rate of plain fp32 arithmetic: megabench keeps TF32 off in fp32 runs.
    """

    name: str
    bf16_tflops: float | None
    fp16_tflops: float
    fp32_tflops: float
    memory_gib: float
    source: str

    def peak_tflops(self, precision: str) -> float | None:
        return {"bf16": self.bf16_tflops, "fp16": self.fp16_tflops, "fp32": self.fp32_tflops}[precision]


_HOPPER = "NVIDIA H100/H200 datasheets (SXM, dense)"

# longest names first: "NVIDIA A100-SXM4-80GB" must not be taken for a shorter pattern
_GPUS = (
    Gpu("H100 PCIe", 756.0, 756.0, 51.0, 80.0, "NVIDIA H100 datasheet (PCIe, dense)"),
    Gpu("H100 NVL", 835.0, 835.0, 60.0, 94.0, "NVIDIA H100 NVL datasheet (dense)"),
    Gpu("GH200", 989.4, 989.4, 66.9, 96.0, "NVIDIA GH200 datasheet (dense)"),
    Gpu("H200", 989.4, 989.4, 66.9, 141.0, _HOPPER),
    Gpu("H100", 989.4, 989.4, 66.9, 80.0, _HOPPER),
    Gpu("B200", 2250.0, 2250.0, 80.0, 180.0, "NVIDIA DGX B200 datasheet (per GPU, dense)"),
    Gpu("A100-SXM4-80GB", 312.0, 312.0, 19.5, 80.0, "NVIDIA A100 datasheet (dense)"),
    Gpu("A100-SXM4-40GB", 312.0, 312.0, 19.5, 40.0, "NVIDIA A100 datasheet (dense)"),
    Gpu("A100", 312.0, 312.0, 19.5, 80.0, "NVIDIA A100 datasheet (dense)"),
    Gpu("V100", None, 125.0, 15.7, 32.0, "NVIDIA V100 datasheet (SXM2)"),
    Gpu("L40S", 362.05, 362.05, 91.6, 48.0, "NVIDIA L40S datasheet (dense)"),
    Gpu("L4", 121.0, 121.0, 30.3, 24.0, "NVIDIA L4 datasheet (dense)"),
    Gpu("A10G", 70.0, 70.0, 35.0, 24.0, "NVIDIA A10G datasheet (dense)"),
)


def find_gpu(device_name: str) -> Gpu | None:
    """The catalogue entry for a CUDA device name such as "NVIDIA H200"; None when it is not known (never a guess)."""
    words = f" {device_name.replace('NVIDIA', '').strip()} "
    for gpu in _GPUS:
        if f" {gpu.name} " in words or f" {gpu.name}-" in words:
            return gpu
    return None
