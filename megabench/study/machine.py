"""The machine that a study is started on. Loads no torch, touches no CUDA."""

import os
import platform
from typing import Any

import pynvml

from megabench.runtime import environment


def gpu_names() -> list[str]:
    """The NVIDIA GPUs that a process started here would see; none where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else _visible(names, visible)


def _visible(names: list[str], visible: str) -> list[str]:
    """Those of `names` that CUDA_VISIBLE_DEVICES lets through: by index, or by UUID, whose name is not looked up."""
    words = [word.strip() for word in visible.split(",")]
    by_index = [names[int(word)] for word in words if word.isdigit() and int(word) < len(names)]
    by_uuid = [names[0] for word in words if names and word.startswith(("GPU-", "MIG-"))]
    return by_index + by_uuid


def describe() -> dict[str, Any]:
    """The content of a study's environment.json."""
    return environment.collect().model_dump() | {
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": gpu_names(),
    }
