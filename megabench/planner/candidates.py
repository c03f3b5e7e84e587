"""Candidates of the planner: the settings of their runs, and how simple they are. Loads no torch."""

from typing import Any

from megabench.config import FIELDS
from megabench.cost.job import Candidate, Job, Recompute
from megabench.planner.engines.registry import PLANNED_ENGINES


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
    return {**common, **PLANNED_ENGINES[candidate.engine].settings_of(candidate.variant)}


RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
# what makes a layout less simple, most important first
COMPLICATIONS = (
    "host memory",
    "recomputation",
    "parallel axes",
    "GPUs per replica",
    "model chunks",
)


def complexity(candidate: Candidate, job: Job) -> tuple[int, ...]:
    """Return how much of each of the COMPLICATIONS a candidate has. Simpler candidates have smaller tuples."""
    layout, engine = candidate.layout, PLANNED_ENGINES[candidate.engine]
    return (
        int(engine.host_bytes(job, candidate, 1) > 0),
        RECOMPUTES.index(candidate.recompute),
        sum(size > 1 for size in (layout.tp, layout.cp, layout.pp)),
        layout.tp * layout.cp * layout.pp,
        layout.vp,
    )
