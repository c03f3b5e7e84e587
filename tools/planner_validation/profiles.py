"""Create the shipped profiles: the fitted constants, their measurements and their starting points. Loads no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from megabench.cost.profile import Profile, shipped_profiles
from tools.planner_validation import fit
from tools.planner_validation.collectives import Collective
from tools.planner_validation.published import Row

# starting point of every fit
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
# the project's own records that are fitted: four layers each, too small for the studies that they predict; with fused
# kernels as the engines have them now, and without
OWN_FITTED = ("options-4-gpus", "nccl-parity-bf16")
# of larger ones the memory alone: four layers have few activations, beside which an allocator's fragments are many
OWN_FITTED_MEMORY = (*OWN_FITTED, "llama3-8b-nvlink-synthetic", "llama3-8b-two-gpus-synthetic", "llama3-8b-scaling")
# constants that `megabench calibrate` did not measure
_FEW = ("unfused_traffic", "step_seconds")


@dataclass(frozen=True)
class Measurements:
    """All there is to fit and to try; what `megabench calibrate` found on H200s, `nvlink` on four of one host."""

    published: Sequence[Row]
    collectives: Sequence[Collective]
    own: Sequence[Row]
    calibrated: Profile
    nvlink: Profile


def fitted_profiles(measured: Measurements) -> dict[str, Profile]:
    """Fit the profiles of the GPUs with published measurements."""
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
    """The shipped profile with what `megabench calibrate` measured: all but links other than NVLink."""
    here = measured.calibrated
    found = {name: getattr(here, name) for name in here.origin if name not in ("*", "links")}
    links = shipped.links | {"nvlink": measured.nvlink.links["nvlink"]}
    said = dict.fromkeys(found, "megabench calibrate on 2 × H200 (benchmarks/calibrate-h200)")
    said["links.nvlink"] = "megabench calibrate on 4 × H200 (benchmarks/calibrate-h200)"
    return shipped.model_copy(update=found | {"links": links, "origin": shipped.origin | said, "kind": "measured"})


def _with_origin(profile: Profile, what: str, names: Sequence[str]) -> Profile:
    """Return the profile with the source of each fitted constant."""
    fitted = dict.fromkeys(names, f"fitted to {what}, make validate-planner")
    return profile.model_copy(update={"origin": profile.origin | fitted})


def is_own_fitted(row: Row) -> bool:
    return row.source.name in OWN_FITTED


def is_memory_fitted(row: Row) -> bool:
    return row.source.name in OWN_FITTED_MEMORY


def _fit_published(profile: Profile, chip: str, measured: Measurements) -> Profile:
    """Links to collectives, speed to step times, memory to peaks; of one-node rows alone."""
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
    """Return the profiles for megabench's own runs.

    What an allocator holds beyond the formulas is the program's more than the GPU's: the share of own records is all's.
    """
    share = {name: getattr(profiles["h200"], name) for name in fit.MEMORY}
    said = f"own records on H200 ({', '.join(OWN_FITTED_MEMORY)})"
    return {
        name: _with_origin(profile.model_copy(update=share), said, fit.MEMORY) for name, profile in profiles.items()
    }


def write_profiles(profiles: dict[str, Profile]) -> None:
    """Write the profiles into the package, rounded to four digits."""
    for name, profile in for_own_engines(profiles).items():
        path = Path(str(files("megabench.cost") / "profiles" / f"{name}.json"))
        path.write_text(json.dumps(_rounded(profile.model_dump(exclude_defaults=True)), indent=2) + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value
