"""Convert a candidate of the planner into the settings of a run. Loads no torch."""

from typing import Any

from megabench.config import FIELDS
from megabench.cost.job import Candidate
from megabench.specs.registry import ENGINES


def settings_of(candidate: Candidate) -> dict[str, Any]:
    """Return the non-default settings of a run that trains the candidate."""
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
    }
    kept = ("engine", "micro_batch")
    common = {name: value for name, value in fields.items() if name in kept or value != FIELDS[name].default}
    return {**common, **ENGINES[candidate.engine].variant_settings(candidate.variant)}
