"""One line about a layout that is predicted to be much faster than that of a run. Loads no torch."""

import shlex

from megabench.config import RunConfig
from megabench.cost.profile import profile_for
from megabench.errors import UserError
from megabench.hardware.topology import Topology
from megabench.planner.costs import Costs
from megabench.planner.predict import candidate_of, job_of, work_of
from megabench.planner.search import plan, settings_of
from megabench.record import RunRecord


def faster_layout(record: RunRecord, topology: Topology) -> str | None:
    """Return a sentence about the layout that the plan recommends for the work of a run on its GPUs.

    Return None if its predicted gain is less than the profile's `least_gain`, if the GPUs or the engine cannot be
    predicted, or on CPUs.
    """
    device, candidate = topology.hosts[0].device, candidate_of(record)
    if device == "cpu" or candidate is None:
        return None
    profile = profile_for(device)
    try:
        job = job_of(record)
        here = Costs(job, topology, profile).estimate(candidate)
        found = plan(work_of(job), topology, profile, keep=1).ranked
    except UserError:
        return None
    if not found or (gain := here.step_seconds / found[0].step_seconds) < profile.least_gain:
        return None
    best = found[0].candidate
    flags = shlex.join(RunConfig.parse(settings_of(best)).flags())
    names = f"{best.name} trains {gain:.2f} × as fast as {candidate.name}"
    return f"megabench plan predicts that {names} on these GPUs: {flags}"
