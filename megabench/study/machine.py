"""Describe the machine on which a study starts. Does not import torch or initialize CUDA."""

import os
import platform
from typing import Any

from megabench.hardware.facts import visible_gpus
from megabench.runtime import environment


def gpu_names() -> list[str]:
    """Return the names of the NVIDIA GPUs that a new process would see, or [] without a driver."""
    return [name for _, name in visible_gpus()]


def describe() -> dict[str, Any]:
    """Return the content of environment.json of a study."""
    return environment.collect().model_dump() | {
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": gpu_names(),
    }
