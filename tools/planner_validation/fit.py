"""Fits of profile constants to measurements. This module does not import torch."""

import math
import statistics
from collections.abc import Sequence

from megabench.cost.fitting import RANGES, descend
from megabench.cost.profile import Profile
from tools.planner_validation.program_costs import ProgramCosts, costs
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
    return costs(row.job, row.topology, profile).estimate(row.candidate).step_seconds


def predicted_gib(row: Row, profile: Profile) -> float:
    """Return the predicted peak memory in GiB of the GPU that the source measured: rank 0 or the fullest GPU."""
    found = costs(row.job, row.topology, profile)
    if row.source.first_rank_memory and isinstance(found, ProgramCosts) and row.candidate.engine == "megatron":
        return found.stage_memory(row.candidate, stage=0).total / 2**30
    return found.memory(row.candidate).total / 2**30


def fit_speed(profile: Profile, rows: Sequence[Row], names: Sequence[str] = SPEED) -> Profile:
    """Return the profile that minimizes the mean of |ln(predicted ÷ measured)| over the step times of `rows`.

    The absolute value is smoothed near zero. Without smoothing, coordinate descent stops at corners of the loss, and
    the result depends on the initial values.
    """

    def loss(candidate: Profile) -> float:
        return statistics.mean(
            math.hypot(math.log(predicted_seconds(row, candidate) / row.measured["seconds"]), _NOISE) for row in rows
        )

    return descend(profile, names, loss, RANGES | {"flash_1_share": (0.1, 1.0)})


def fit_memory(profile: Profile, rows: Sequence[Row]) -> Profile:
    """Return the profile that minimizes the mean of |ln(predicted ÷ measured)| over the peak memory of `rows`."""

    def loss(candidate: Profile) -> float:
        return statistics.mean(
            abs(math.log(predicted_gib(row, candidate) / row.measured["memory_gib"])) for row in rows
        )

    return descend(profile, MEMORY, loss)
