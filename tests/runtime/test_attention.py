"""Which attention kernel torch runs, and that records name it."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from megabench.runtime.attention import kernel_name, kernel_order, pin_kernel


@pytest.mark.parametrize(
    ("capability", "cudnn_version", "first"),
    [
        ((9, 0), 91501, SDPBackend.CUDNN_ATTENTION),
        ((9, 0), 91900, SDPBackend.CUDNN_ATTENTION),
        ((9, 0), 91500, SDPBackend.FLASH_ATTENTION),
        ((9, 0), 0, SDPBackend.FLASH_ATTENTION),
        ((8, 0), 91900, SDPBackend.FLASH_ATTENTION),
        ((10, 3), 91900, SDPBackend.CUDNN_ATTENTION),
    ],
)
def test_the_first_kernel(capability: tuple[int, int], cudnn_version: int, first: SDPBackend) -> None:
    order = kernel_order(capability, cudnn_version)
    assert order[0] == first
    assert order[-1] == SDPBackend.MATH, "every dtype and size needs a kernel"


def test_the_name_on_cpu() -> None:
    cpu = torch.device("cpu")
    assert kernel_name(cpu, torch.bfloat16, 64, 16) == "flash attention for CPU"
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        assert kernel_name(cpu, torch.bfloat16, 64, 16) == "unfused"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_named_kernel_runs() -> None:
    device = torch.device("cuda")
    pin_kernel(device)
    signs = {"cuDNN": "cudnn", "FlashAttention-2": "flash", "memory-efficient": "fmha", "unfused": "softmax"}
    for dtype, groups in ((torch.bfloat16, 4), (torch.bfloat16, 1), (torch.float32, 4), (torch.float32, 1)):
        query, key = (
            torch.randn(1, heads, 256, 128, dtype=dtype, device=device, requires_grad=True) for heads in (2 * groups, 2)
        )
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
            torch.cuda.synchronize()
        ran = " ".join(event.key.lower() for event in profile.key_averages())
        name = kernel_name(device, dtype, 256, 128, groups)
        assert signs[name.split()[0]] in ran, (name, ran)
