"""The machine that a study is started on. Loads no torch, touches no CUDA."""

import os
import platform
from typing import Any

from megabench.hardware.facts import visible_gpus
from megabench.runtime import environment


def gpu_names() -> list[str]:
    """The NVIDIA GPUs that a process started here would see; none where there is no driver."""
    return [name for _, name in visible_gpus()]


def describe() -> dict[str, Any]:
    """The content of a study's environment.json."""
    return environment.collect().model_dump() | {
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": gpu_names(),
    }
