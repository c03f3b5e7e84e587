"""Fits a profile's constants to measurements. Loads no torch."""

import math
import statistics
from collections.abc import Sequence

from megabench.cost.fitting import descend
from megabench.cost.profile import Profile
from megabench.planner.engines import Costs
from megabench.specs.megatron_memory import stage_memory
from tools.planner_validation.collectives import Collective
from tools.planner_validation.published import Row

# constants that are fitted to published step times; the others are from data sheets and micro-benchmarks
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
_NOISE = 0.02  # typical difference of repeated runs
_LARGE = 1e6  # smallest message size in bytes that is relevant for training


def predicted_seconds(row: Row, profile: Profile) -> float:
    """Return the predicted seconds per step of a published configuration."""
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
