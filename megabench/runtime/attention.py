"""Choice of the kernel for torch's scaled_dot_product_attention, and its name for records.

On Hopper, cuDNN's kernel is about twice as fast as torch's own, which is FlashAttention-2. The default depends on the
versions of torch and cuDNN, so without a fixed order, two machines could run different kernels unnoticed.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH_2 = "FlashAttention-2"
_OLDEST_CUDNN = 91501  # older versions fail for some sequence lengths (pytorch issue 169849)
_WITH_CUDNN = (9, 10)  # major compute capabilities of Hopper and of data-center Blackwell

# sdpa_kernel's context, which would end when it is garbage-collected
_pinned = None


def pin_kernel(device: torch.device) -> None:
    """Fix the order in which torch tries its attention kernels, for the life of this process. Does nothing on CPU.

    A kernel that does not support a dtype or size is skipped.
    """
    global _pinned
    if device.type == "cpu" or _pinned is not None:
        return
    _pinned = sdpa_kernel(kernel_order(torch.cuda.get_device_capability(device), _cudnn_version()), set_priority=True)
    _pinned.__enter__()


def kernel_order(capability: tuple[int, int], cudnn_version: int) -> list[SDPBackend]:
    """Return the kernels to try on a GPU of this compute capability, best first."""
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if capability[0] in _WITH_CUDNN and cudnn_version >= _OLDEST_CUDNN:
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return order


def kernel_name(device: torch.device, dtype: torch.dtype, length: int, head_size: int, group_size: int = 1) -> str:
    """Return the kernel that torch runs for causal attention over `length` tokens.

    `group_size` is the number of query heads per KV head.
    """
    query, key = (
        torch.empty(1, heads, length, head_size, dtype=dtype, device=device, requires_grad=True)
        for heads in (group_size, 1)
    )
    choice = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=group_size > 1)
    backend = SDPBackend(choice)
    if backend == SDPBackend.MATH:
        return "unfused"
    if device.type == "cpu":
        return "flash attention for CPU"
    if backend == SDPBackend.CUDNN_ATTENTION:
        version = _cudnn_version()
        return f"cuDNN {version // 10_000}.{version // 100 % 100}.{version % 100}"
    return FLASH_2 if backend == SDPBackend.FLASH_ATTENTION else "memory-efficient"


def _cudnn_version() -> int:
    """Return cuDNN's version, such as 91501 for 9.15.1, or 0 without cuDNN."""
    return torch.backends.cudnn.version() or 0
