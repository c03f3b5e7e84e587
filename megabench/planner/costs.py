"""Predict time and memory of candidates by part, for every engine that is planned. Loads no torch."""

from dataclasses import dataclass

from megabench.cost.job import Candidate, Job
from megabench.cost.memory import MAY_FIT, Memory, fit_chance, likely_bytes
from megabench.cost.profile import Profile
from megabench.cost.shared_costs import Base
from megabench.hardware.topology import Topology
from megabench.parallel.axes import AXIS_BY_NAME
from megabench.planner.engines.planned_engine import CostModel
from megabench.planner.engines.registry import PLANNED_ENGINES


@dataclass(frozen=True)
class Estimate:
    """A prediction. `parts` are seconds and add up to the step; `exposed` contains the exposed communication by group.

    The parts are compute, recompute, launch (waiting for the host), tp, cp, pp, dp, bubble, optimizer (with all other
    work done once per step), and offload. `fit_chance` is the chance that the layout fits, from the errors of measured
    predictions. `missing_bytes` is the memory that a GPU lacks for a layout that is likely to fit, and is negative if
    memory is left.
    """

    candidate: Candidate
    step_seconds: float
    parts: dict[str, float]
    memory: Memory
    missing_bytes: float
    fit_chance: float
    host_bytes: float
    tokens_per_second_per_device: float
    mfu: float

    @property
    def fits(self) -> bool:
        """Whether the layout is likely to fit."""
        return self.missing_bytes <= 0

    @property
    def tokens_per_second(self) -> float:
        """The throughput of all GPUs."""
        return self.tokens_per_second_per_device * self.candidate.layout.world_size

    @property
    def exposed(self) -> dict[str, float]:
        return {axis: self.parts[axis] for axis in AXIS_BY_NAME if self.parts.get(axis)}


class Costs:
    """Predicts candidates for one job on one topology. Shared costs are computed once."""

    def __init__(self, job: Job, topology: Topology, profile: Profile) -> None:
        self.job, self.profile = job, profile
        self.base = self.shared(job, topology, profile)
        plain = self.shared(job.without_added_gradients(), topology, profile)
        bases = {name: self.base if engine.adds_gradients else plain for name, engine in PLANNED_ENGINES.items()}
        self._jobs = {name: base.job for name, base in bases.items()}
        self._models = {name: self.model(name, base) for name, base in bases.items()}
        self.available_bytes = profile.available_bytes(topology.hosts[0].device)
        self.usable_bytes = likely_bytes(self.available_bytes)

    def shared(self, job: Job, topology: Topology, profile: Profile) -> Base:
        """Return the costs that the candidates of a job share."""
        return Base(job, topology, profile)

    def model(self, engine: str, base: Base) -> CostModel:
        """Return the cost model of an engine."""
        return PLANNED_ENGINES[engine].cost_model(base)

    def memory(self, candidate: Candidate) -> Memory:
        engine = candidate.engine
        return PLANNED_ENGINES[engine].memory(self._jobs[engine], candidate, self.profile)

    def missing_bytes(self, candidate: Candidate) -> float:
        """Return the bytes that the fullest GPU lacks for a likely fit, or a negative number if memory is left."""
        return self.memory(candidate).total - self.usable_bytes

    def may_fit(self, missing_bytes: float) -> bool:
        """Return whether a layout that lacks these bytes may still fit, as its predicted memory has an error."""
        return missing_bytes + self.usable_bytes <= MAY_FIT * self.available_bytes

    def shortest(self, candidate: Candidate) -> float:
        """Return a lower bound of the step time in seconds."""
        return self._models[candidate.engine].shortest(candidate)

    def estimate(self, candidate: Candidate) -> Estimate:
        """The whole prediction."""
        model = self._models[candidate.engine]
        parts = model.parts(candidate)
        step = sum(parts.values())
        memory = self.memory(candidate)
        ranks_per_server = self.base.geometry_of(candidate).ranks_per_server
        per_device = self.job.tokens / step / candidate.layout.world_size
        return Estimate(
            candidate=candidate,
            step_seconds=step,
            parts=parts,
            memory=memory,
            missing_bytes=memory.total - self.usable_bytes,
            fit_chance=fit_chance(memory.total, self.available_bytes),
            host_bytes=PLANNED_ENGINES[candidate.engine].host_bytes(self.job, candidate, ranks_per_server),
            tokens_per_second_per_device=per_device,
            mfu=per_device * self.job.flops_per_token / self.base.peak,
        )
