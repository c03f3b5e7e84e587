"""Profile: the measured or fitted constants of a machine.

Profiles are shipped with the package or written by `calibrate`.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megabench.cost.job import Product
from megabench.hardware.gpus import Gpu, find_gpu, gpu_memory_mib, near_gpus
from megabench.hardware.topology import Link
from megabench.precision import POLICIES
from megabench.settings.reading import ConfigError, explain, read_json

GENERIC = "generic"
_DERIVED_ERROR = 0.3  # relative error of a profile that is derived from that of another GPU, as of other assumed ones
SCHEMA_VERSION = 1  # of profiles; CONTRIBUTING.md says when it changes


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class LinkCost(_Part):
    """The cost of a link: T = base + steps · hop + bytes / bandwidth, as in NCCL's tuner for rings.

    `efficiency` is a share of the topology's bandwidth; `gb_per_s` is used if the topology states no bandwidth. A
    collective of two ranks reaches `pair_share` of the bandwidth of larger groups. Trees between hosts, with which NCCL
    reduces, reach `tree_share` of a ring's bandwidth.
    """

    efficiency: float = Field(gt=0, le=1.2)
    base_seconds: float = Field(ge=0)
    hop_seconds: float = Field(ge=0)
    gb_per_s: float | None = Field(default=None, gt=0)
    pair_share: float = Field(default=1.0, gt=0, le=1)
    tree_share: float = Field(default=1.0, gt=0, le=1)


class Fp8Cost(_Part):
    """The cost of linear layers with fp8 products.

    `forward` (with fast accumulation), `input_gradient` (without) and `weight_gradient` (without, written in fp32) are
    fractions of the peak FLOP/s in fp8 in a product of 8192³. `half_k` is the inner size of a product that reaches half
    the FLOP/s of a long one.
    """

    forward: float = Field(gt=0, le=1)
    input_gradient: float = Field(gt=0, le=1)
    weight_gradient: float = Field(gt=0, le=1)
    half_k: float = Field(ge=0)
    cast_share: float = Field(gt=0, le=1)
    """Bandwidth of the kernels that find the largest value and cast, divided by `memory_gb_per_s`."""

    def efficiency(self, product: Product) -> float:
        """Return the fraction of the peak FLOP/s in a product of 8192³."""
        match product:
            case "forward":
                return self.forward
            case "input_gradient":
                return self.input_gradient
            case "weight_gradient":
                return self.weight_gradient


class Measurement(_Part):
    """A measurement on the slowest rank, such as a matrix product of size [m, n, k], or a collective with its bytes."""

    kind: str
    sizes: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]


ATTENTION = ("attention_forward", "attention_backward", "attention_half_length")  # constants of flash attention


class Profile(_Part):
    """The constants of the cost model for one kind of GPU.

    `origin` is the source of each constant, with "*" for all other constants. `relative_error` is the error of the cost
    model. Layouts whose predictions differ by less than `relative_error` count as equal.
    """

    schema_version: int
    name: str
    devices: list[str]
    """Names of the GPUs with these constants, as CUDA reports them."""
    kind: Literal["measured", "fitted", "assumed"]
    origin: dict[str, str]
    relative_error: float = Field(gt=0)
    peak_tflops: dict[str, float] = {}
    """Peak TFLOP/s by precision, for a GPU that is not in the catalog."""
    memory_gib: float | None = Field(None, gt=0)
    """GPU memory, for a GPU that is not in the catalog."""
    num_sms: int = Field(gt=0)
    """Number of streaming multiprocessors. For CPUs, the number of threads of a process."""
    gemm_efficiency: float = Field(gt=0, le=1)
    """Fraction of the peak FLOP/s in a product of 8192³."""
    gemm_half_k: float = Field(ge=0)
    """Inner size of a matrix product that reaches half the FLOP/s of a long one."""
    attention_forward: float = Field(gt=0, le=1)
    """Fraction of the peak FLOP/s that flash attention reaches with long sequences and many heads."""
    attention_backward: float = Field(gt=0, le=1)
    attention_half_length: float = Field(0, ge=0)
    """Sequence length at which flash attention with many heads reaches half of these fractions."""
    fp8: Fp8Cost | None = None
    """The cost of fp8 products, for GPUs that have them."""
    flash_2_share: float = Field(gt=0, le=1)
    """FLOP/s of FlashAttention-2 divided by that of cuDNN's attention."""
    memory_gb_per_s: float = Field(gt=0)
    """Measured bandwidth of a copy, counting bytes read and written."""
    launch_seconds: float = Field(ge=0)
    """Host time to launch a kernel from Python."""
    collective_launch_seconds: float = Field(ge=0)
    """Host time to launch a collective."""
    step_seconds: float = Field(ge=0)
    """Host time per step for the batch, the gradient norm and the loss."""
    interference: float = Field(ge=0, le=1)
    """Slowdown of compute as a fraction of overlapped communication time, inside a host."""
    unfused_traffic: float = Field(ge=1)
    """Bytes moved by unfused element-wise kernels divided by those of fused kernels."""
    allocator_share: float = Field(ge=0)
    """Unallocated reserved memory as a fraction of activations, logits and buffers."""
    gather_allocator_share: float | None = Field(None, ge=0)
    """Value of allocator_share for ZeRO-3 and for DDP with weight casts, if it differs."""
    headroom: float | None = Field(None, exclude=True)
    """Not used: only accepted, because profiles of earlier releases have it."""
    context_gib: float = Field(ge=0)
    """GPU memory that is not available to torch's allocator."""
    host_copy_gb_per_s: float = Field(gt=0)
    """Copy bandwidth between one GPU and pinned host memory."""
    dram_gb_per_s: float = Field(gt=0)
    """Bandwidth of host memory, shared by all GPUs of a host."""
    links: dict[Link, LinkCost]
    measurements: list[Measurement] = []

    @property
    def least_gain(self) -> float:
        """Smallest predicted ratio of step times to report: 1.1, or the error of the cost model if that is larger."""
        return max(1.1, 1 + self.relative_error)

    def peak(self, device: str, precision: str) -> float:
        """Return the peak dense FLOP/s of a GPU.

        Raises ConfigError if the peak is unknown, or if the GPU or the profile has no fp8 products.
        """
        gpu = find_gpu(device)
        if POLICIES[precision].has_fp8_products:
            if gpu and gpu.fp8_tflops is None:
                raise ConfigError(
                    f"precision={precision} needs Hopper GPUs or newer ones, but the cluster has {device}; use "
                    f"precision=bf16"
                )
            if self.fp8 is None:
                raise ConfigError(
                    f"profile {self.name} has no costs of fp8 products; use precision=bf16, or a profile that sets fp8"
                )
        tflops = (gpu.peak_tflops(precision) if gpu else None) or self.peak_tflops.get(precision)
        if tflops is None and gpu:
            raise ConfigError(f"{device} has no matrix products in {precision}; use precision=fp16")
        if tflops is None:
            near = near_gpus(device)
            call = f"name the GPU {' or '.join(near[:4])}, or " if near else ""
            raise ConfigError(
                f"the peak of {device!r} in {precision} is unknown; {call}use a --profile FILE that sets peak_tflops"
            )
        return tflops * 1e12

    def gib(self, device: str) -> float:
        """Return the memory of a GPU in GiB. Raises ConfigError if it is unknown."""
        mib = gpu_memory_mib(device)
        if mib is None and self.memory_gib is None:
            raise ConfigError(f"the memory of {device!r} is unknown; use a --profile FILE that sets memory_gib")
        return mib / 1024 if mib is not None else self.memory_gib or 0.0

    def available_bytes(self, device: str) -> float:
        """Return the GPU memory in bytes that torch can allocate. Raises ConfigError if the memory is unknown."""
        return (self.gib(device) - self.context_gib) * 2**30


def read_profile(path: Path) -> Profile:
    """Read a profile file. Raises ConfigError if the file is not a profile, or has another schema version."""
    content = read_json(path)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has profile schema {version}, and this megabench reads schema {SCHEMA_VERSION}; create a profile "
            f"with megabench calibrate"
        )
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path} is not a valid profile: {explain(error, Profile.model_fields)}") from None


@cache
def shipped_profiles() -> dict[str, Profile]:
    """Return the shipped profiles by name."""
    folder = files("megabench.cost") / "profiles"
    found = [
        Profile.model_validate_json(entry.read_text()) for entry in folder.iterdir() if entry.name.endswith("json")
    ]
    return {profile.name: profile for profile in found}


@cache
def profile_for(device: str) -> Profile:
    """Return the shipped profile of a GPU by its CUDA name, or one derived from that of the nearest architecture.

    Devices that are not in the catalogue of GPUs have the generic profile.
    """
    profiles = shipped_profiles()
    shipped = next((found for found in profiles.values() if device in found.devices), None)
    gpu = find_gpu(device)
    if shipped or not gpu or not gpu.like:
        return shipped or profiles[GENERIC]
    like = find_gpu(gpu.like)
    assert like
    return _derived(profile_for(gpu.like), like, gpu, device)


def _derived(profile: Profile, like: Gpu, gpu: Gpu, device: str) -> Profile:
    """Return the profile of the GPU `like`, scaled to `gpu` by the published figures of both.

    A matrix product and attention reach the same fraction of the peak FLOP/s, and element-wise operations the same
    share of the memory bandwidth. The start of a matrix product takes as long, so its inner size of half the FLOP/s
    grows with the peak. Links have the same share of the bandwidth that the topology states.
    """
    bandwidth, peak = gpu.memory_gb_per_s / like.memory_gb_per_s, gpu.fp16_tflops / like.fp16_tflops
    changes: dict[str, object] = {
        "name": f"{profile.name} scaled to {gpu.name}",
        "devices": [device],
        "kind": "assumed",
        "relative_error": max(profile.relative_error, _DERIVED_ERROR),
        "memory_gb_per_s": profile.memory_gb_per_s * bandwidth,
        "gemm_half_k": profile.gemm_half_k * peak,
        "peak_tflops": {},
        "memory_gib": None,
        "measurements": [],
    }
    here = f"as in the profile {profile.name} of the {like.name}: not measured on the {gpu.name}"
    scaled = f"the {like.name}'s in the profile {profile.name}, times the ratio of the published"
    origin = {
        "*": here,
        "memory_gb_per_s": f"{scaled} memory bandwidths, {gpu.memory_gb_per_s:g} ÷ {like.memory_gb_per_s:g} GB/s",
        "gemm_half_k": f"{scaled} peaks, {gpu.fp16_tflops:g} ÷ {like.fp16_tflops:g} TFLOP/s",
    }
    if profile.fp8 and gpu.fp8_tflops and like.fp8_tflops:
        half_k = profile.fp8.half_k * gpu.fp8_tflops / like.fp8_tflops
        changes["fp8"] = profile.fp8.model_copy(update={"half_k": half_k})
        origin["fp8"] = f"estimated, not measured: {here}"
    else:
        changes["fp8"] = None
    return profile.model_copy(update=changes | {"origin": origin})
