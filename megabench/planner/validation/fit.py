"""Fits a profile's constants to measurements. Loads no torch."""

import math
import statistics
from collections.abc import Callable, Sequence

from megabench.planner.engines import Costs
from megabench.planner.profile import Profile
from megabench.planner.validation.published import Row

# constants that published step times tell about; the rest is from data sheets and micro-benchmarks
SPEED = (
    "gemm_half_k",
    "attention_forward",
    "memory_gb_per_s",
    "launch_seconds",
    "collective_launch_seconds",
    "step_seconds",
    "interference",
    "unfused_traffic",
)
MEMORY = ("allocator_share",)
_STEPS = (1.6, 1.25, 1.1, 1.04)  # by which a constant is moved, coarse to fine
_RANGES = {
    "gemm_half_k": (1.0, 2000.0),
    "attention_forward": (0.2, 0.85),
    "memory_gb_per_s": (500.0, 4900.0),
    "launch_seconds": (1e-6, 5e-5),
    "collective_launch_seconds": (1e-5, 1e-3),
    "step_seconds": (1e-4, 0.2),
    "interference": (0.01, 1.0),
    "unfused_traffic": (1.0, 8.0),
    "allocator_share": (0.01, 0.5),
}


def predicted_seconds(row: Row, profile: Profile) -> float:
    """Seconds of a step of a published configuration."""
    return Costs(row.job, row.topology, profile).estimate(row.candidate).step_seconds


def predicted_gib(row: Row, profile: Profile) -> float:
    """GiB of the fullest GPU of a published configuration."""
    return Costs(row.job, row.topology, profile).memory(row.candidate).total / 2**30


def fit_speed(profile: Profile, rows: Sequence[Row]) -> Profile:
    """The profile whose step times are nearest to those of `rows`, by the mean of |ln predicted ÷ measured|."""

    def loss(candidate: Profile) -> float:
        return statistics.mean(
            abs(math.log(predicted_seconds(row, candidate) / row.measured["seconds"])) for row in rows
        )

    return _descend(profile, SPEED, loss)


def fit_memory(profile: Profile, rows: Sequence[Row]) -> Profile:
    """The profile whose peaks are nearest to those of `rows`."""

    def loss(candidate: Profile) -> float:
        return statistics.mean(
            abs(math.log(predicted_gib(row, candidate) / row.measured["memory_gib"])) for row in rows
        )

    return _descend(profile, MEMORY, loss)


def _descend(profile: Profile, names: Sequence[str], loss: Callable[[Profile], float]) -> Profile:
    """Coordinate descent in the logarithm of each constant, with steps that become finer."""
    best = loss(profile)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in names:
                for factor in (step, 1 / step):
                    low, high = _RANGES[name]
                    value = min(max(getattr(profile, name) * factor, low), high)
                    changes = {name: value}
                    if name == "attention_forward":
                        # flash attention's backward reaches about four fifths of its forward (arXiv 2307.08691)
                        changes["attention_backward"] = 0.8 * value
                    moved = profile.model_copy(update=changes)
                    found = loss(moved)
                    if found < best * (1 - 1e-4):
                        profile, best, improved = moved, found, True
    return profile
