"""GPUs without a measured profile: their costs follow from those of another GPU, by the published figures of both."""

import math

import pytest

from megabench.config import ConfigError
from megabench.cost.profile import profile_for, shipped_profiles
from megabench.hardware.gpus import GPU_NAMES, find_gpu
from megabench.planner.make_plan import make_plan
from tests.planner.jobs import cluster, costs, job, megatron, zero

WITH_A_PROFILE = {device for profile in shipped_profiles().values() for device in profile.devices}


@pytest.mark.parametrize("name", GPU_NAMES)
def test_every_gpu_of_the_catalogue_has_costs(name):
    gpu, profile = find_gpu(name), profile_for(name)
    assert gpu and gpu.memory_gb_per_s > 0 and name in profile.devices
    assert (gpu.like is None) == (name in WITH_A_PROFILE)
    # Copies reach 75% to 95% of the published bandwidth. The A100 with 40 GB has the profile of the one with 80 GB.
    assert 0.75 < profile.memory_gb_per_s / gpu.memory_gb_per_s < (1.2 if "SXM4-40GB" in name else 0.96)
    assert (gpu.fp8_tflops is None) or profile.fp8


def test_a_derived_profile_names_its_source_and_is_assumed():
    blackwell, derived = profile_for("NVIDIA B200"), profile_for("NVIDIA GB300")
    assert derived.name == "blackwell scaled to GB300" and derived.kind == "assumed"
    assert derived.memory_gb_per_s == pytest.approx(blackwell.memory_gb_per_s * 8000 / 7700)
    assert derived.gemm_half_k == pytest.approx(blackwell.gemm_half_k * 2500 / 2250)
    assert derived.links == blackwell.links and derived.gemm_efficiency == blackwell.gemm_efficiency
    assert "8000 ÷ 7700 GB/s" in derived.origin["memory_gb_per_s"] and "not measured" in derived.origin["*"]
    nvl = profile_for("NVIDIA H100 NVL")
    assert nvl.relative_error == 0.3 and not nvl.peak_tflops and nvl.memory_gib is None
    assert nvl.available_bytes("NVIDIA H100 NVL") > profile_for("NVIDIA H100 80GB HBM3").available_bytes(
        "NVIDIA H100 80GB HBM3"
    )
    assert profile_for("NVIDIA A100 80GB PCIe").fp8 is None


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("p6-b200.48xlarge:2", "p6-b300.48xlarge:2"),
        ("Standard_ND128isr_NDR_GB200_v6:4", "Standard_ND128isr_GB300_v6:4"),
    ],
)
def test_a_newer_gpu_is_not_slower(older, newer, precision):
    work = job(global_batch=64, precision=precision)
    for candidate in (zero(cluster(older)), megatron(cluster(older), tp=2), megatron(cluster(older), tp=2, pp=4)):
        before, after = (costs(work, cluster(one)).estimate(candidate).step_seconds for one in (older, newer))
        assert 0.8 * before < after <= before, candidate.name


def test_a_gpu_without_the_precision_is_refused():
    with pytest.raises(ConfigError) as refused:
        profile_for("Tesla V100-SXM2-32GB").peak("Tesla V100-SXM2-32GB", "bf16")
    assert str(refused.value) == "Tesla V100-SXM2-32GB has no matrix products in bf16; use precision=fp16"


@pytest.mark.parametrize("name", sorted(set(GPU_NAMES) - WITH_A_PROFILE))
def test_plans_for_derived_gpus_have_finite_figures(name, tmp_path):
    path, gpu = tmp_path / "cluster.yaml", find_gpu(name)
    assert gpu
    path.write_text(f"hosts:\n  - {{count: 2, gpu: {name}, num_gpus: 4, network: infiniband, network_gbits: 400}}\n")
    precision = "bf16" if gpu.bf16_tflops else "fp16"
    plan = make_plan("gpt2", str(path), 512, 32, None, "fp32", None, 5, None, precision=precision)
    assert plan.ranked
    for one in plan.ranked:
        assert math.isfinite(one.step_seconds) and 0 < one.mfu < 1
