"""Profile: the measured or fitted constants of a machine.

Profiles are shipped with the package or written by `calibrate`.
"""

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megabench.hardware.gpus import GPU_NAMES, find_gpu, gpu_memory_mib
from megabench.hardware.topology import Link
from megabench.settings.reading import ConfigError, explain, read_text

GENERIC = "generic"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LinkCost(_Part):
    """What a link achieves: T = base + steps · hop + bytes / bandwidth (NCCL's own tuner: cost-model of its rings).

    `efficiency` is a share of the topology's bandwidth; `gb_per_s` is used if the topology states no bandwidth. A
    collective of two ranks reaches `pair_share` of the bandwidth.
    """

    efficiency: float = Field(gt=0, le=1.2)
    base_seconds: float = Field(ge=0)
    hop_seconds: float = Field(ge=0)
    gb_per_s: float | None = Field(default=None, gt=0)
    pair_share: float = Field(default=1.0, gt=0, le=1)


class Measurement(_Part):
    """A measurement of calibrate on the slowest rank: a product [m, n, k], or the bytes and ranks of a collective."""

    kind: str
    sizes: dict[str, float]
    seconds: float


class Profile(_Part):
    """The constants of the cost model for one kind of GPU.

    `origin` is the source of each constant, with "*" for all other constants. `relative_error` is the error of the cost
    model. Layouts whose predictions differ by less are equal.
    """

    name: str
    devices: list[str] = Field(description="CUDA's names of the GPUs that it is for")
    kind: Literal["measured", "fitted", "assumed"]
    origin: dict[str, str]
    relative_error: float = Field(gt=0)
    peak_tflops: dict[str, float] = Field({}, description="by precision, where the catalogue has none")
    memory_gib: float | None = Field(None, gt=0, description="of a GPU, where the catalogue has none")
    num_sms: int = Field(gt=0)
    gemm_efficiency: float = Field(gt=0, le=1, description="of the peak, in a product of 8192³")
    gemm_half_k: float = Field(ge=0, description="inner size k at which k/(k + this) halves the rate")
    attention_forward: float = Field(gt=0, le=1, description="flash attention's share of the peak")
    attention_backward: float = Field(gt=0, le=1)
    flash_2_share: float = Field(gt=0, le=1, description="FlashAttention-2's rate, of cuDNN's")
    memory_gb_per_s: float = Field(gt=0, description="achieved by a copy, bytes read and written")
    launch_seconds: float = Field(ge=0, description="of the host, to start a kernel from Python")
    collective_launch_seconds: float = Field(ge=0, description="of the host, to start a collective")
    step_seconds: float = Field(ge=0, description="of the host, once a step: batches, norms, loss")
    interference: float = Field(
        ge=0, le=1, description="of hidden communication, but over sockets, that compute pays for"
    )
    unfused_traffic: float = Field(
        ge=1, description="bytes of unfused element-wise kernels, as multiple of fused ones'"
    )
    allocator_share: float = Field(
        ge=0, description="memory reserved beyond what is allocated, as a share of activations, logits and buffers"
    )
    gather_allocator_share: float | None = Field(
        None, ge=0, description="the same where ZeRO-3 gathers weights or DDP casts them in between, if it differs"
    )
    headroom: float = Field(ge=0, lt=1, description="of a GPU's memory to leave free: fuller ones free and ask again")
    context_gib: float = Field(ge=0, description="of a GPU's memory that torch's allocator never gets")
    host_copy_gb_per_s: float = Field(gt=0, description="GPU to pinned host memory, a GPU")
    dram_gb_per_s: float = Field(gt=0, description="host memory, all GPUs of a host together")
    links: dict[Link, LinkCost]
    measurements: list[Measurement] = []

    def peak(self, device: str, precision: str) -> float:
        """Return the dense FLOP/s of a GPU; ConfigError where nobody knows."""
        gpu = find_gpu(device)
        tflops = (gpu.peak_tflops(precision) if gpu else None) or self.peak_tflops.get(precision)
        if tflops is None:
            near = [name for name in GPU_NAMES if device.lower() in name.lower()]
            call = f"call it {' or '.join(near[:4])}, or " if near else ""
            raise ConfigError(
                f"the peak of {device!r} in {precision} is not known; {call}give --profile FILE with peak_tflops in it"
            )
        return tflops * 1e12

    def usable_bytes(self, device: str) -> float:
        """Return the memory of a GPU that a layout may use; ConfigError where nobody knows."""
        mib = gpu_memory_mib(device)
        if mib is None and self.memory_gib is None:
            raise ConfigError(f"the memory of {device!r} is not known; give --profile FILE with memory_gib in it")
        gib = mib / 1024 if mib is not None else self.memory_gib or 0.0
        return (gib - self.context_gib) * (1 - self.headroom) * 2**30


def read_profile(path: Path) -> Profile:
    """A profile file; Raises ConfigError if the file is not a profile."""
    try:
        return Profile.model_validate(json.loads(read_text(path)))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}; make one with megabench calibrate") from None
    except ValidationError as error:
        raise ConfigError(f"{path} is no profile: {explain(error, Profile.model_fields)}") from None


@cache
def shipped_profiles() -> dict[str, Profile]:
    """Return the shipped profiles by name."""
    folder = files("megabench.cost") / "profiles"
    found = [
        Profile.model_validate_json(entry.read_text()) for entry in folder.iterdir() if entry.name.endswith("json")
    ]
    return {profile.name: profile for profile in found}


def profile_for(device: str) -> Profile:
    """Return the shipped profile of a GPU by its CUDA name, or the generic profile for other GPUs."""
    profiles = shipped_profiles()
    return next((found for found in profiles.values() if device in found.devices), profiles[GENERIC])
