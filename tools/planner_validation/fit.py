"""Fits a profile's constants to measurements. Loads no torch."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import cast

from megabench.cost.memory import stage_memory
from megabench.cost.profile import Profile
from megabench.hardware.topology import Link
from megabench.planner.engines import Costs
from tools.planner_validation.collectives import Collective
from tools.planner_validation.published import Row

# constants that published step times tell about; the rest is from data sheets and micro-benchmarks
SPEED = (
    "gemm_half_k",
    "attention_forward",
    "launch_seconds",
    "collective_launch_seconds",
    "step_seconds",
    "interference",
    "unfused_traffic",
)
MEMORY = ("allocator_share", "gather_allocator_share")
LINKS = ("nvlink.efficiency", "efa.efficiency", "efa.hop_seconds", "efa.base_seconds")
_WORTH = 1e-3  # part of the loss that a move must save
_NOISE = 0.02  # by which repeated runs differ
_LARGE = 1e6  # bytes, from which on a collective tells about training
_BACKWARD_SHARE = 0.8  # of its forward's rate that flash attention's backward reaches (arXiv 2307.08691, figures 5, 6)
_STEPS = (2.0, 1.3, 1.1, 1.03)  # by which a constant is moved, coarse to fine
_RANGES = {
    "gemm_half_k": (1.0, 500.0),
    "attention_forward": (0.2, 0.85),
    "gemm_efficiency": (0.05, 1.0),
    "launch_seconds": (1e-6, 5e-5),
    "collective_launch_seconds": (1e-5, 1e-3),
    "step_seconds": (1e-4, 0.2),
    "interference": (0.01, 1.0),
    "unfused_traffic": (1.0, 8.0),
    "allocator_share": (0.01, 0.6),
    "gather_allocator_share": (0.01, 0.6),
    "nvlink.efficiency": (0.3, 1.0),
    "efa.efficiency": (0.2, 1.0),
    "efa.hop_seconds": (5e-6, 2e-4),
    "efa.base_seconds": (1e-5, 3e-4),
}


def predicted_seconds(row: Row, profile: Profile) -> float:
    """Seconds of a step of a published configuration."""
    return Costs(row.job, row.topology, profile).estimate(row.candidate).step_seconds


def predicted_gib(row: Row, profile: Profile) -> float:
    """GiB of the GPU of a published configuration whose peak its source states: the fullest, or the first."""
    if row.source.first_rank_memory and row.candidate.engine == "megatron":
        return stage_memory(row.job, row.candidate, profile, stage=0).total / 2**30
    return Costs(row.job, row.topology, profile).memory(row.candidate).total / 2**30


def fit_speed(profile: Profile, rows: Sequence[Row], names: Sequence[str] = SPEED) -> Profile:
    """The profile whose step times are nearest to those of `rows`, by the mean of |ln predicted ÷ measured|.

    Rounded off near nothing: moving one constant at a time gets stuck in the corners of a sum of absolute values, and
    what it found hung on where it began.
    """

    def loss(candidate: Profile) -> float:
        return statistics.mean(
            math.hypot(math.log(predicted_seconds(row, candidate) / row.measured["seconds"]), _NOISE) for row in rows
        )

    return descend(profile, names, loss)


def fit_memory(profile: Profile, rows: Sequence[Row]) -> Profile:
    """The profile whose peaks are nearest to those of `rows`."""

    def loss(candidate: Profile) -> float:
        return statistics.mean(
            abs(math.log(predicted_gib(row, candidate) / row.measured["memory_gib"])) for row in rows
        )

    return descend(profile, MEMORY, loss)


def fit_links(profile: Profile, collectives: Sequence[Collective]) -> Profile:
    """The profile whose NVLink and EFA are nearest to measured collectives of a megabyte and more."""
    large = [one for one in collectives if one.num_bytes >= _LARGE]

    def loss(candidate: Profile) -> float:
        return statistics.mean(abs(math.log(one.predicted(candidate) / one.seconds)) for one in large)

    return descend(profile, LINKS, loss)


def _value(profile: Profile, name: str) -> float:
    """A constant, or one of a link as "nvlink.efficiency"."""
    link, dot, part = name.partition(".")
    found: float = getattr(profile.links[cast(Link, link)], part) if dot else getattr(profile, name)
    return found


def _moved(profile: Profile, name: str, value: float) -> Profile:
    """The profile with another value of a constant."""
    link, dot, part = name.partition(".")
    if dot:
        changed = profile.links[cast(Link, link)].model_copy(update={part: value})
        return profile.model_copy(update={"links": profile.links | {link: changed}})
    changes = {name: value}
    if name == "attention_forward":
        changes["attention_backward"] = _BACKWARD_SHARE * value
    return profile.model_copy(update=changes)


def descend(profile: Profile, names: Sequence[str], loss: Callable[[Profile], float]) -> Profile:
    """Coordinate descent in the logarithm of each constant, with steps that become finer, again and again."""
    best = loss(profile)
    begun = math.inf
    while best < begun * (1 - _WORTH):
        begun = best
        for step in _STEPS:
            for name in names:
                for factor in (step, 1 / step):
                    low, high = _RANGES[name]
                    moved = _moved(profile, name, min(max(_value(profile, name) * factor, low), high))
                    found = loss(moved)
                    while found < best * (1 - _WORTH):
                        profile, best = moved, found
                        moved = _moved(profile, name, min(max(_value(profile, name) * factor, low), high))
                        found = loss(moved)
    return profile
