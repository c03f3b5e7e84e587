"""Fits of the shipped profiles: constants, measurements and initial values. This module does not import torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from megabench.cost.profile import Profile, shipped_profiles
from tools.planner_validation import fit
from tools.planner_validation.collectives import Collective
from tools.planner_validation.published import Row

# initial values of the fitted constants, independent of the values in the shipped profiles
_START = {
    "gemm_half_k": 150.0,
    "attention_forward": 0.6,
    "attention_backward": 0.48,
    "launch_seconds": 1e-5,
    "collective_launch_seconds": 1e-4,
    "step_seconds": 0.01,
    "interference": 0.5,
    "unfused_traffic": 3.0,
    "allocator_share": 0.2,
    "gather_allocator_share": 0.2,
}
# The constants are fitted to the step times of these studies. Their models have four layers, and most models of the
# held-out studies have more. These studies cover the fused kernels of the current engines and unfused kernels.
OWN_FITTED = ("options-4-gpus", "nccl-parity-bf16")
# The memory constants are fitted to the peak memory of these studies. Models with more
# than four layers are included, because allocator fragmentation distorts the memory of small models.
OWN_FITTED_MEMORY = (*OWN_FITTED, "llama3-8b-nvlink-synthetic", "llama3-8b-two-gpus-synthetic", "llama3-8b-scaling")
# step-time constants that `megabench calibrate` does not measure
_FEW = ("unfused_traffic", "step_seconds")


@dataclass(frozen=True)
class Measurements:
    """All measurements for fits and validation.

    `calibrated` and `nvlink` are the profiles that `megabench calibrate` measured on two and on four H200s of one host.
    """

    published: Sequence[Row]
    collectives: Sequence[Collective]
    own: Sequence[Row]
    calibrated: Profile
    nvlink: Profile


def fitted_profiles(measured: Measurements) -> dict[str, Profile]:
    """Return newly fitted profiles of the GPU types with measurements: H100, A100 and H200."""
    shipped = shipped_profiles()
    h100 = _fit_published(shipped["h100"], "H100", measured)
    a100 = _fit_published(shipped["a100"], "A100", measured)
    own = [row for row in measured.own if is_own_fitted(row)]
    start = {name: _START[name] for name in (*_FEW, *fit.MEMORY)}
    h200 = fit.fit_speed(_calibrated(shipped["h200"], measured).model_copy(update=start), own, _FEW)
    h200 = fit.fit_memory(h200, _with_peaks([row for row in measured.own if is_memory_fitted(row)]))
    said = "published one-node runs and collectives"
    return {
        "h100": _with_origin(h100, said, [*fit.SPEED, *fit.MEMORY, *fit.LINKS]),
        "a100": _with_origin(a100, said, [*fit.SPEED, *fit.LINKS]),
        "h200": _with_origin(h200, f"own records ({', '.join(OWN_FITTED)})", _FEW),
    }


def _calibrated(shipped: Profile, measured: Measurements) -> Profile:
    """Return the shipped profile with the constants and the NVLink values that `megabench calibrate` measured."""
    here = measured.calibrated
    found = {name: getattr(here, name) for name in here.origin if name not in ("*", "links")}
    links = shipped.links | {"nvlink": measured.nvlink.links["nvlink"]}
    said = dict.fromkeys(found, "megabench calibrate on 2 × H200 (benchmarks/calibrate-h200)")
    said["links.nvlink"] = "megabench calibrate on 4 × H200 (benchmarks/calibrate-h200)"
    return shipped.model_copy(update=found | {"links": links, "origin": shipped.origin | said, "kind": "measured"})


def _with_origin(profile: Profile, what: str, names: Sequence[str]) -> Profile:
    """Return the profile with the origin of each fitted constant in `names`."""
    fitted = dict.fromkeys(names, f"fitted to {what} by make validate-planner")
    return profile.model_copy(update={"origin": profile.origin | fitted})


def is_own_fitted(row: Row) -> bool:
    return row.source.name in OWN_FITTED


def is_memory_fitted(row: Row) -> bool:
    return row.source.name in OWN_FITTED_MEMORY


def _fit_published(profile: Profile, chip: str, measured: Measurements) -> Profile:
    """Fit links to collectives, speed to step times and memory to peak memory.

    Step times and peak memory are those of single-node runs.
    """
    rows = [row for row in measured.published if row.is_fit and chip in row.topology.hosts[0].device]
    profile = _reset(profile)
    profile = fit.fit_links(profile, [one for one in measured.collectives if one.gpu == chip])
    profile = fit.fit_speed(profile, [row for row in rows if "seconds" in row.measured])
    with_peaks = _with_peaks(rows)
    return fit.fit_memory(profile, with_peaks) if with_peaks else profile


def _with_peaks(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "memory_gib" in row.measured]


def _reset(profile: Profile) -> Profile:
    return profile.model_copy(update=_START)


def for_own_engines(profiles: dict[str, Profile]) -> dict[str, Profile]:
    """Return the profiles for predictions of megabench's runs.

    Allocator overhead depends more on the training program than on the GPU. All profiles use the allocator
    shares that were fitted to this project's H200 records.
    """
    share = {name: getattr(profiles["h200"], name) for name in fit.MEMORY}
    said = f"own records on H200 ({', '.join(OWN_FITTED_MEMORY)})"
    return {
        name: _with_origin(profile.model_copy(update=share), said, fit.MEMORY) for name, profile in profiles.items()
    }


def write_profiles(profiles: dict[str, Profile]) -> None:
    """Write the fitted profiles over the shipped profiles, rounded to four significant digits."""
    for name, profile in for_own_engines(profiles).items():
        path = Path(str(files("megabench.cost") / "profiles" / f"{name}.json"))
        path.write_text(json.dumps(_rounded(profile.model_dump(exclude_defaults=True)), indent=2) + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value
