"""Coordinate descent over the constants of a profile. Loads no torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from megabench.cost.profile import Profile
from megabench.hardware.topology import Link

_WORTH = 1e-3  # smallest relative decrease of the loss for which the search accepts a move
_BACKWARD_SHARE = 0.8  # FLOP/s of flash attention's backward ÷ forward (arXiv 2307.08691, figures 5, 6)
_STEPS = (2.0, 1.3, 1.1, 1.03)  # factors by which the search changes a constant, from coarse to fine
RANGES = {
    "gemm_half_k": (1.0, 500.0),
    "attention_forward": (0.2, 0.85),
    "gemm_efficiency": (0.05, 1.0),
    "launch_seconds": (1e-6, 5e-5),
    "collective_launch_seconds": (1e-6, 1e-3),
    "step_seconds": (1e-4, 0.2),
    "interference": (0.01, 1.0),
    "unfused_traffic": (1.0, 8.0),
    "allocator_share": (0.01, 0.6),
    "gather_allocator_share": (0.01, 0.6),
    "efficiency": (1e-5, 1.0),
    "gb_per_s": (1e-4, 2000.0),
    "hop_seconds": (1e-6, 0.1),
    "base_seconds": (1e-6, 0.1),
    "tree_share": (0.05, 1.0),
}


def _value(profile: Profile, name: str) -> float:
    """Return a constant of the profile, such as "nvlink.efficiency" for a link."""
    link, dot, part = name.partition(".")
    found: float = getattr(profile.links[cast(Link, link)], part) if dot else getattr(profile, name)
    return found


def _moved(profile: Profile, name: str, value: float) -> Profile:
    """Return the profile with another value of a constant."""
    link, dot, part = name.partition(".")
    if dot:
        changed = profile.links[cast(Link, link)].model_copy(update={part: value})
        return profile.model_copy(update={"links": profile.links | {link: changed}})
    changes = {name: value}
    if name == "attention_forward":
        changes["attention_backward"] = _BACKWARD_SHARE * value
    return profile.model_copy(update=changes)


def descend(
    profile: Profile,
    names: Sequence[str],
    loss: Callable[[Profile], float],
    ranges: Mapping[str, tuple[float, float]] = RANGES,
) -> Profile:
    """Fit constants by coordinate descent in their logarithms, with decreasing step sizes."""
    best = loss(profile)
    begun = math.inf
    while best < begun * (1 - _WORTH):
        begun = best
        for step in _STEPS:
            for name in names:
                for factor in (step, 1 / step):
                    low, high = ranges[name.rpartition(".")[2]]
                    moved = _moved(profile, name, min(max(_value(profile, name) * factor, low), high))
                    found = loss(moved)
                    while found < best * (1 - _WORTH):
                        profile, best = moved, found
                        moved = _moved(profile, name, min(max(_value(profile, name) * factor, low), high))
                        found = loss(moved)
    return profile
