"""Fits of profile constants to measurements. This module does not import torch."""

import math
import statistics
from collections.abc import Sequence

from megabench.cost.fitting import descend
from megabench.cost.profile import Profile
from megabench.planner.engines import Costs
from megabench.specs.megatron_memory import stage_memory
from tools.planner_validation.published import Row

# Constants fitted to published step times. Other constants come from data sheets and micro-benchmarks.
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
_NOISE = 0.02  # relative difference between repeated runs


def predicted_seconds(row: Row, profile: Profile) -> float:
    """Return the predicted step time of a configuration in seconds."""
    return Costs(row.job, row.topology, profile).estimate(row.candidate).step_seconds


def predicted_gib(row: Row, profile: Profile) -> float:
    """Return the predicted peak memory in GiB of the GPU that the source measured: rank 0 or the fullest GPU."""
    if row.source.first_rank_memory and row.candidate.engine == "megatron":
        return stage_memory(row.job, row.candidate, profile, stage=0).total / 2**30
    return Costs(row.job, row.topology, profile).memory(row.candidate).total / 2**30


def fit_speed(profile: Profile, rows: Sequence[Row], names: Sequence[str] = SPEED) -> Profile:
    """Return the profile that minimizes the mean of |ln(predicted ÷ measured)| over the step times of `rows`.

    The absolute value is smoothed near zero. Without smoothing, coordinate descent stops at corners of the loss, and
    the result depends on the initial values.
    """

    def loss(candidate: Profile) -> float:
        return statistics.mean(
            math.hypot(math.log(predicted_seconds(row, candidate) / row.measured["seconds"]), _NOISE) for row in rows
        )

    return descend(profile, names, loss)


def fit_memory(profile: Profile, rows: Sequence[Row]) -> Profile:
    """Return the profile that minimizes the mean of |ln(predicted ÷ measured)| over the peak memory of `rows`."""

    def loss(candidate: Profile) -> float:
        return statistics.mean(
            abs(math.log(predicted_gib(row, candidate) / row.measured["memory_gib"])) for row in rows
        )

    return descend(profile, MEMORY, loss)
