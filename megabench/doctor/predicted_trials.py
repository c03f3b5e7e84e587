"""The planner's predictions for a study that has not run: of its trials, and of the best layouts. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.config.auto import resolve_first
from megabench.cost.job import Candidate, Job
from megabench.cost.memory import LIKELY
from megabench.cost.profile import Profile, profile_for
from megabench.errors import UserError
from megabench.hardware.topology import Topology
from megabench.planner.costs import Costs, Estimate
from megabench.planner.predict import candidate_of, is_planned, job_of, work_of
from megabench.planner.search import RECOMPUTES, Plan, micro_batches_of, plan, refuse_several_gpus
from megabench.record import RunRecord
from megabench.specs.registry import ENGINES

# Below this chance to fit, a trial is more likely to run out of memory than to run.
EVEN = 0.5
_GIB = 2**30


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that has not run. `record` has the requested settings, and `topology` the positions of its ranks."""

    record: RunRecord
    given: RunConfig
    run: ResolvedConfig
    topology: Topology


def planned_job(trial: PlannedTrial) -> Job:
    """Return the job of a trial that has not run."""
    run = trial.run
    return replace(
        job_of(trial.record),
        shape=run.shape,
        fp8_recipe=run.fp8_recipe or "tensorwise",
        num_layers_at_start_in_bf16=run.num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16=run.num_layers_at_end_in_bf16,
    )


@dataclass
class Predictions:
    """All predictions for one study, each computed once. `measured` is the profile with a measured network."""

    measured: Profile | None = None
    refusals: dict[str, str] = field(default_factory=dict)
    """Why `megabench plan` refuses the GPUs or the precision of a trial, by the name of the trial."""
    _costs: dict[tuple[Job, Topology], Costs] = field(default_factory=dict)
    _estimates: dict[tuple[Job, Topology, Candidate], Estimate] = field(default_factory=dict)
    _plans: dict[tuple[Job, Topology], Plan | None] = field(default_factory=dict)

    def profile(self, topology: Topology) -> Profile:
        """Return the profile with which `megabench plan` predicts, too."""
        return self.measured or profile_for(topology.hosts[0].device)

    def costs(self, job: Job, topology: Topology) -> Costs:
        """Return the cost model. Raise ConfigError for GPUs or a precision that `megabench plan` refuses."""
        if (job, topology) not in self._costs:
            refuse_several_gpus(topology)
            self._costs[job, topology] = Costs(job, topology, self.profile(topology))
        return self._costs[job, topology]

    def estimate(self, job: Job, topology: Topology, candidate: Candidate) -> Estimate | None:
        """Return the prediction, or None for GPUs or a precision that `megabench plan` refuses."""
        key = (job, topology, candidate)
        if key not in self._estimates:
            try:
                self._estimates[key] = self.costs(job, topology).estimate(candidate)
            except ConfigError:
                return None
        return self._estimates[key]

    def plan(self, job: Job, topology: Topology) -> Plan | None:
        """Return the plan of `megabench plan` for the work of a trial, or None if it cannot be planned."""
        key = (work_of(job), topology)
        if key not in self._plans:
            try:
                self._plans[key] = plan(*key, self.profile(topology))
            except ConfigError:
                self._plans[key] = None
        return self._plans[key]


@dataclass(frozen=True)
class PredictedTrial:
    """A trial with its prediction. `memory_gib` is the memory of a GPU in GiB."""

    trial: PlannedTrial
    job: Job
    estimate: Estimate
    memory_gib: float
    predictions: Predictions

    @property
    def name(self) -> str:
        return self.trial.record.trial

    @cached_property
    def plan(self) -> Plan | None:
        """The plan for the work and the GPUs of the trial, or None if they cannot be planned for."""
        return self.predictions.plan(self.job, self.trial.topology)

    @property
    def profile(self) -> Profile:
        return self.predictions.profile(self.trial.topology)

    @property
    def least_gain(self) -> float:
        """The smallest predicted gain to report."""
        return self.profile.least_gain

    def gain(self, other: Estimate) -> float:
        """Return the predicted step time of the trial ÷ that of `other`."""
        return self.estimate.step_seconds / other.step_seconds

    @property
    def is_unbeaten(self) -> bool:
        """Whether the trial fits, and the layout that the plan recommends is not faster by a gain to report."""
        best = self.plan.ranked[0] if self.plan and self.plan.ranked else None
        return self.estimate.fits and best is not None and self.gain(best) < self.least_gain

    def used(self, estimate: Estimate) -> float:
        """Return the used share of a GPU's memory."""
        return estimate.memory.total / _GIB / self.memory_gib

    def numbers(self, estimate: Estimate) -> str:
        """Return the predicted memory and step time as text."""
        used = f"{estimate.memory.total / _GIB:.1f} of {self.memory_gib:.0f} GiB of GPU memory"
        likely = (estimate.memory.total - estimate.missing_bytes) / _GIB
        lacks = f", above the {likely:.1f} GiB that fit with a chance of {LIKELY:.0%}"
        if estimate.fits:
            lacks = ""
        elif estimate.fit_chance < EVEN:
            lacks = ", too much to fit"
        return f"{used} ({self.used(estimate):.0%}{lacks}), {estimate.step_seconds:.3g} s per step"

    @property
    def origin(self) -> str:
        return f"the predictions of profile {self.profile.name} have an error of {self.profile.relative_error:.0%}"

    def is_valid(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a run with these settings on the GPUs of the trial is valid."""
        try:
            resolve_first(RunConfig.parse(settings), self.trial.record.world_size, "cuda")
        except UserError:
            return False
        return True


def predict(trial: PlannedTrial, predictions: Predictions) -> PredictedTrial | None:
    """Predict a trial. Return None for a trial on CPUs, or if the planner cannot predict the engine or the GPU.

    If the planner refuses the GPU or the precision, `predictions.refusals` gets the reason.

    "auto" stands for the fastest values that are likely to fit. If none are, it stands for those that need the least
    memory.
    """
    topology = trial.topology
    if trial.run.device == "cpu" or not is_planned(trial.run):
        return None
    job = planned_job(trial)
    try:
        costs = predictions.costs(job, topology)
    except ConfigError as error:
        predictions.refusals[trial.record.trial] = str(error)
        return None
    lacking = {candidate: costs.missing_bytes(candidate) for candidate in _settled(trial, job)}
    fitting = [candidate for candidate, missing in lacking.items() if missing <= 0]
    tried = [
        estimate
        for candidate in fitting or [min(lacking, key=lacking.__getitem__)]
        if (estimate := predictions.estimate(job, topology, candidate))
    ]
    best = min(tried, key=lambda estimate: estimate.step_seconds)
    return PredictedTrial(trial, job, best, costs.profile.gib(topology.hosts[0].device), predictions)


def _settled(trial: PlannedTrial, job: Job) -> list[Candidate]:
    """Return the candidates of a trial, one for each value that its "auto" settings may get."""
    candidate = candidate_of(trial.record)
    assert candidate
    levels, sizes = [candidate.recompute], [candidate.micro_batch]
    if "recompute" in trial.given.auto_settings:
        levels = [level for level in RECOMPUTES if level in ENGINES[candidate.engine].recompute]
    if "micro_batch" in trial.given.auto_settings:
        sizes = micro_batches_of(job, candidate.layout)
    return [replace(candidate, recompute=level, micro_batch=size) for level in levels for size in sizes]
