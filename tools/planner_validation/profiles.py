"""Fits of the shipped profiles: constants, measurements and initial values. This module does not import torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from megabench.cost.fabric import fit_links
from megabench.cost.profile import ATTENTION, LinkCost, Profile, shipped_profiles
from megabench.hardware.topology import Link
from tools.planner_validation import fit
from tools.planner_validation.collectives import Published
from tools.planner_validation.programs import ProgramProfile
from tools.planner_validation.published import Row

# initial values of the fitted constants, independent of the values in the shipped profiles
_START = {
    "gemm_half_k": 150.0,
    "attention_forward": 0.6,
    "attention_backward": 0.48,
    "launch_seconds": 1e-5,
    "collective_launch_seconds": 2.5e-5,
    "step_seconds": 0.01,
    "interference": 0.5,
    "unfused_traffic": 3.0,
    "allocator_share": 0.2,
    "gather_allocator_share": 0.2,
    "flash_1_share": 0.5,
}
_START_LINKS: dict[Link, dict[str, float]] = {
    "nvlink": {"efficiency": 0.7},
    "efa": {"efficiency": 0.8, "hop_seconds": 1e-5, "base_seconds": 1e-4, "tree_share": 0.5},
}
# The constants are fitted to the step times of these studies. Their models have four layers, and most models of the
# held-out studies have more. These studies cover the fused kernels of the current engines and unfused kernels.
OWN_FITTED = ("options-4-gpus", "nccl-parity-bf16")
# The memory constants are fitted to the peak memory of these studies. Models with more
# than four layers are included, because allocator fragmentation distorts the memory of small models.
OWN_FITTED_MEMORY = (*OWN_FITTED, "llama3-8b-nvlink-synthetic", "llama3-8b-two-gpus-synthetic", "llama3-8b-scaling")
# step-time constants that `megabench calibrate` does not measure
_FEW = ("unfused_traffic", "step_seconds")
_NVLINK: Link = "nvlink"
# Constants that depend on a program's kernels and its Python code, fitted to the published runs on H100
_H100_SPEED = ("launch_seconds", "collective_launch_seconds", "step_seconds", "unfused_traffic", "flash_1_share")
# time that Python takes, which depends on the training program, and profiles in which it is fitted to other programs
_FITTED_HOSTS = ("h100", "a100")
_HOST = ("launch_seconds", "collective_launch_seconds")
_H100_LINKS = (
    "nvlink.efficiency",
    "efa.efficiency",
    "efa.hop_seconds",
    "efa.base_seconds",
    "efa.tree_share",
)
_FITTED_EFA = "as fitted to EFA between H100s"
_INFINIBAND_HOP = 1e-5  # seconds
# The collectives on A100 are of two hosts, which do not determine the time per hop or the share of trees.
_A100_LINKS = ("efa.efficiency", "efa.base_seconds")


@dataclass(frozen=True)
class Measurements:
    """All measurements for fits and validation.

    `calibrated` and `nvlink` are the profiles that `megabench calibrate` measured on two and on four H200s of one host,
    and `h100` is that of two H100s. `attention` is a later profile of two H200s, with attention of several lengths and
    fp8 products. Its host launches kernels more slowly than the hosts of the own records.
    """

    published: Sequence[Row]
    collectives: Sequence[Published]
    own: Sequence[Row]
    calibrated: Profile
    attention: Profile
    nvlink: Profile
    h100: Profile


def fitted_profiles(measured: Measurements) -> dict[str, Profile]:
    """Return the shipped profiles with newly fitted constants.

    The GPUs H100, A100 and H200 have measurements. Other profiles take only the H100's rings and trees between hosts.
    """
    published = published_profiles(measured)
    shipped = {name: _with_network_of(published["h100"], profile) for name, profile in shipped_profiles().items()}
    own = [row for row in measured.own if is_own_fitted(row)]
    start = {name: _START[name] for name in (*_FEW, *fit.MEMORY)}
    h200 = _with_nvlink_of(measured.nvlink, _calibrated(shipped["h200"], measured.calibrated, "H200"))
    h200 = _calibrated(h200, measured.attention, "H200", (*ATTENTION, "fp8"))
    h200 = fit.fit_speed(h200.model_copy(update=start), own, _FEW)
    h200 = fit.fit_memory(h200, _with_peaks([row for row in measured.own if is_memory_fitted(row)]))
    return shipped | published | {"h200": _with_origin(h200, f"own records ({', '.join(OWN_FITTED)})", _FEW)}


def published_profiles(measured: Measurements) -> dict[str, Profile]:
    """Return newly fitted profiles of the GPUs of published runs: H100 and A100."""
    extended = {name: ProgramProfile(**profile.model_dump()) for name, profile in shipped_profiles().items()}
    shipped = {name: _with_pairs_of(measured.nvlink, profile) for name, profile in extended.items()}
    start = {name: _START[name] for name in (*_H100_SPEED, *fit.MEMORY)}
    h100 = _calibrated(_with_start_links(shipped["h100"]), measured.h100, "H100").model_copy(update=start)
    h100 = _fit_published(h100, "H100", measured, _H100_LINKS, _H100_SPEED)
    h100 = _with_network_of(h100, h100)
    start = {name: _START[name] for name in (*fit.SPEED, "attention_backward", *fit.MEMORY)}
    a100 = _with_network_of(h100, _with_start_links(shipped["a100"]).model_copy(update=start))
    a100 = _fit_published(a100, "A100", measured, _A100_LINKS, fit.SPEED)
    said = "published one-node runs and collectives"
    return {
        "h100": _with_origin(h100, said, [*_H100_SPEED, *fit.MEMORY, *_H100_LINKS]),
        "a100": _with_origin(a100, said, [*fit.SPEED, *_A100_LINKS]),
    }


def _calibrated(shipped: Profile, here: Profile, gpu: str, only: Sequence[str] = ()) -> Profile:
    """Return the shipped profile with constants that `megabench calibrate` measured on two GPUs: `only` some, or all.

    Links are not included.
    """
    names = only or [name for name in here.origin if name not in ("*", "links")]
    found = {name: getattr(here, name) for name in names}
    kept = {name: said for name, said in shipped.origin.items() if name.partition(".")[0] not in found}
    said = dict.fromkeys(found, f"megabench calibrate on 2 × {gpu} (benchmarks/calibrate-{gpu.lower()})")
    return shipped.model_copy(update=found | {"origin": kept | said, "kind": "measured"})


def _with_nvlink_of(here: Profile, profile: Profile) -> Profile:
    links = profile.links | {"nvlink": here.links["nvlink"]}
    said = {"links.nvlink": "megabench calibrate on 4 × H200 (benchmarks/calibrate-h200)"}
    return profile.model_copy(update={"links": links, "origin": profile.origin | said})


def _with_origin(profile: Profile, what: str, names: Sequence[str]) -> Profile:
    """Return the profile with the origin of each fitted constant in `names`."""
    fitted = dict.fromkeys(names, f"fitted to {what} by make validate-planner")
    return profile.model_copy(update={"origin": profile.origin | fitted})


def is_own_fitted(row: Row) -> bool:
    return row.source.name in OWN_FITTED


def is_memory_fitted(row: Row) -> bool:
    return row.source.name in OWN_FITTED_MEMORY


def _with_pairs_of(h200: Profile, profile: Profile) -> Profile:
    """Return the profile with the part of the NVLink bandwidth that two ranks reach on the H200.

    On H100s, two ranks reach 0.81 of the fitted bandwidth of larger groups (benchmarks/calibrate-h100).
    """
    share = h200.links["nvlink"].pair_share
    nvlink = profile.links["nvlink"].model_copy(update={"pair_share": share})
    said = {"nvlink.pair_share": "as measured on H200s (benchmarks/calibrate-h200)"}
    return profile.model_copy(update={"links": profile.links | {"nvlink": nvlink}, "origin": profile.origin | said})


def _with_network_of(h100: Profile, profile: Profile) -> Profile:
    """Return the profile with the H100's time per hop over EFA, and its share of trees over EFA and InfiniBand.

    Only the H100 has measurements over more than two hosts. H200 instances have the H100's EFA. A hop over InfiniBand
    takes a fraction of the time.
    """
    efa, infiniband = profile.links["efa"], profile.links["infiniband"]
    tree_share, hop_seconds = h100.links["efa"].tree_share, h100.links["efa"].hop_seconds
    links: dict[Link, LinkCost] = {
        "efa": efa.model_copy(update={"hop_seconds": hop_seconds, "tree_share": tree_share}),
        "infiniband": infiniband.model_copy(update={"hop_seconds": _INFINIBAND_HOP, "tree_share": tree_share}),
    }
    said = dict.fromkeys(("efa.hop_seconds", "efa.tree_share", "infiniband.tree_share"), _FITTED_EFA)
    said["infiniband.hop_seconds"] = "broadcasts over up to 1,024 A100s in InternEvo's runs, 9 to 10 µs"
    if profile.name == "h200":
        links["efa"] = h100.links["efa"]
        said |= dict.fromkeys(("efa.efficiency", "efa.base_seconds"), _FITTED_EFA)
    return profile.model_copy(update={"links": profile.links | links, "origin": profile.origin | said})


def _fit_published(
    profile: Profile, chip: str, measured: Measurements, links: Sequence[str], speed: Sequence[str]
) -> Profile:
    """Fit links to collectives, speed to step times and memory to peak memory.

    Step times and peak memory are those of single-node runs.
    """
    rows = [row for row in measured.published if row.is_fit and chip in row.topology.hosts[0].device]
    collectives = [(one.collective, one.host, _NVLINK) for one in measured.collectives if one.gpu == chip]
    profile = fit_links(profile, collectives, links)
    profile = fit.fit_speed(profile, [row for row in rows if "seconds" in row.measured], speed)
    with_peaks = _with_peaks(rows)
    return fit.fit_memory(profile, with_peaks) if with_peaks else profile


def _with_peaks(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "memory_gib" in row.measured]


def _with_start_links(profile: Profile) -> Profile:
    links = {link: profile.links[link].model_copy(update=start) for link, start in _START_LINKS.items()}
    return profile.model_copy(update={"links": profile.links | links})


def for_own_engines(profiles: dict[str, Profile], here: Profile) -> dict[str, Profile]:
    """Return the profiles that predict runs of megabench itself.

    Allocator overhead depends more on the training program than on the GPU. All profiles use the allocator
    shares that were fitted to this project's H200 records. The profiles that were fitted to published programs take the
    host times of `here`, which `megabench calibrate` measured on a host of H100s.
    """
    share = {name: getattr(profiles["h200"], name) for name in fit.MEMORY}
    said = f"own records on H200 ({', '.join(OWN_FITTED_MEMORY)})"
    found = {
        name: _with_origin(profile.model_copy(update=share), said, fit.MEMORY) for name, profile in profiles.items()
    }
    host = {name: getattr(here, name) for name in _HOST}
    origin = dict.fromkeys(_HOST, "megabench calibrate on a host of H100s (benchmarks/calibrate-h100)")
    fitted = {name: found[name] for name in _FITTED_HOSTS}
    return found | {
        name: profile.model_copy(update=host | {"origin": profile.origin | origin}) for name, profile in fitted.items()
    }


def write_profiles(profiles: dict[str, Profile]) -> None:
    """Write the profiles over the shipped profiles, without FlashAttention-1, rounded to four significant digits."""
    for name, profile in profiles.items():
        path = Path(str(files("megabench.cost") / "profiles" / f"{name}.json"))
        shipped = profile.model_dump(
            exclude_defaults=True, exclude={"flash_1_share": True, "origin": {"flash_1_share"}}
        )
        path.write_text(json.dumps(_rounded(shipped), indent=2) + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value
