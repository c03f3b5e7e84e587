"""GPUs are known by the name that CUDA gives them, or not at all."""

import pytest

from megabench.hardware.gpus import find_gpu


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
    ],
)
def test_peaks(name: str, precision: str, peak: float | None) -> None:
    gpu = find_gpu(name)
    assert gpu is not None and gpu.peak_tflops(precision) == peak


@pytest.mark.parametrize("name", ["NVIDIA H300", "NVIDIA H200 MIG 1g.18gb", "cpu", ""])
def test_unknown_ones_are_not_guessed_at(name: str) -> None:
    assert find_gpu(name) is None
