"""Converts a candidate of the planner into the settings of a run. Loads no torch."""

from typing import Any

from megabench.config import FIELDS
from megabench.cost.job import Candidate


def settings_of(candidate: Candidate) -> dict[str, Any]:
    """The settings of a run that trains the candidate, without those at their defaults."""
    layout = candidate.layout
    fields: dict[str, Any] = {
        "engine": candidate.engine,
        "tp": layout.tp,
        "cp": layout.cp,
        "pp": layout.pp,
        "vp": layout.vp,
        "micro_batch": candidate.micro_batch,
        "recompute": candidate.recompute,
        "placement": candidate.placement,
        "offload": candidate.offload,
        "shard_size": candidate.shard_size,
        "hpz_size": candidate.hpz_size,
        "reshard_after_forward": not candidate.keeps_weights,
    }
    if candidate.engine == "deepspeed":
        fields["zero_stage"] = candidate.zero_stage
        fields["zero_leaf_layers"] = candidate.zero_stage == 3  # what is predicted: a host that waits for no parts
    kept = ("engine", "micro_batch", "zero_stage")
    return {name: value for name, value in fields.items() if name in kept or value != FIELDS[name].default}
