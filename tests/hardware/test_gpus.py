"""GPUs are known by the name that CUDA gives them, or not at all."""

import pytest

from megabench.cost.profile import profile_for
from megabench.hardware.gpus import (
    GPU_NAMES,
    INSTANCE_NAMES,
    find_gpu,
    find_instance,
    find_ultraserver,
    gpu_memory_mib,
)


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


def test_every_gpu_and_instance_names_its_source() -> None:
    for name in GPU_NAMES:
        gpu = find_gpu(name)
        assert gpu and gpu.source and gpu.memory_mib > 8192
    for name in INSTANCE_NAMES:
        instance = find_instance(name)
        assert instance and instance.source and find_gpu(instance.gpu), name
        assert (instance.nvlink_gb_per_s > 0) == (instance.nvlink_domain > 1), name


@pytest.mark.parametrize(
    ("name", "num_gpus", "network", "gbits", "domain"),
    [
        ("p5en.48xlarge", 8, "efa", 3200, 8),
        ("p6-b200.48xlarge", 8, "efa", 3200, 8),
        ("p6-b300.48xlarge", 8, "efa", 6400, 8),
        ("p6e-gb200.36xlarge", 4, "efa", 1600, 72),
        ("a3-highgpu-8g", 8, "infiniband", 800, 8),
        ("a3-megagpu-8g", 8, "infiniband", 1600, 8),
        ("a3-ultragpu-8g", 8, "infiniband", 3200, 8),
        ("a4-highgpu-8g", 8, "infiniband", 3200, 8),
        ("a4x-highgpu-4g", 4, "infiniband", 1600, 72),
        ("a4x-maxgpu-4g-metal", 4, "infiniband", 3200, 72),
        ("Standard_ND96isr_H100_v5", 8, "infiniband", 3200, 8),
        ("Standard_ND96isr_H200_v5", 8, "infiniband", 3200, 8),
        ("Standard_ND128isr_NDR_GB200_v6", 4, "infiniband", 1600, 72),
        ("Standard_ND128isr_GB300_v6", 4, "infiniband", 3200, 72),
    ],
)
def test_instances_of_the_clouds(name: str, num_gpus: int, network: str, gbits: float, domain: int) -> None:
    instance = find_instance(name)
    assert instance is not None and instance.name == name
    found = (instance.num_gpus, instance.network, instance.network_gbits, instance.nvlink_domain)
    assert found == (num_gpus, network, gbits, domain)


def test_azure_names_without_prefix_and_in_any_case() -> None:
    assert find_instance("nd96isr_h100_v5") == find_instance("Standard_ND96isr_H100_v5")
    assert find_instance("P5.48xlarge") == find_instance("p5.48xlarge")
    assert find_instance("p5") is None


def test_ultraservers() -> None:
    found = find_ultraserver("u-p6e-gb200x36")
    assert found is not None and (found[0].name, found[0].nvlink_domain, found[1]) == ("p6e-gb200.36xlarge", 36, 9)
    assert find_ultraserver("p6e-gb200.36xlarge") is None


def test_only_instances_with_a_measured_or_fitted_gpu_are_tested() -> None:
    tested = [instance for name in INSTANCE_NAMES if (instance := find_instance(name)) and instance.is_tested]
    assert [instance.name.split(".")[0] for instance in tested] == ["p4d", "p4de", "p5", "p5e", "p5en"]
    assert {profile_for(instance.gpu).kind for instance in tested} == {"fitted", "measured"}


@pytest.mark.parametrize("name", ["NVIDIA B200", "NVIDIA B300 SXM6 AC", "NVIDIA GB200", "NVIDIA GB300"])
def test_blackwell_has_all_precisions(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu is not None and gpu.fp8_tflops == 2 * (gpu.bf16_tflops or 0) and gpu_memory_mib(name) == gpu.memory_mib
