"""Diagnosis rules for a planned study that compare its trials with predictions of the planner. Loads no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megabench.config import ResolvedConfig, RunConfig
from megabench.config.auto import resolve_first
from megabench.cost.job import Candidate, Job
from megabench.cost.profile import profile_for
from megabench.doctor.finding import Case, Finding, Rule, is_tried_larger, was_tuned
from megabench.doctor.speed_rules import HALF
from megabench.errors import UserError
from megabench.hardware.gpus import find_gpu, gpu_memory_mib
from megabench.hardware.topology import Topology
from megabench.parallel.layout import LayoutError
from megabench.planner.costs import Costs, Estimate
from megabench.planner.engines.planned_engine import PlannedEngine
from megabench.planner.engines.registry import PLANNED_ENGINES
from megabench.planner.predict import candidate_of, job_of
from megabench.record import RunRecord
from megabench.specs.all_settings import engines_with
from megabench.specs.registry import ENGINES_AND_PROGRAMS

# Smallest predicted gain to report, unless the error of the profile is larger.
_LEAST_GAIN = 1.1
# Predictions that differ by less than this factor count as equal.
_EQUAL = 1.02
_GIB = 2**30


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that has not run. `record` has the requested settings, and `topology` the positions of its ranks."""

    record: RunRecord
    given: RunConfig
    run: ResolvedConfig
    topology: Topology


def rules_for(trials: Sequence[PlannedTrial]) -> tuple[Rule, ...]:
    """Return the rules that compare these trials with predictions. There are none for trials on CPUs."""
    advisers = [adviser for trial in trials if (adviser := _adviser(trial))]
    whole = [engine for engine in PLANNED_ENGINES.values() if engine.spec.sharding_stage == 0]
    replicated = next((engine for engine in whole if engine.spec.is_data_parallel), None)

    def faster_settings(case: Case) -> Iterator[Finding]:
        """Report fp32, and micro-batches that leave most of the GPU memory unused, if other values are faster."""
        for adviser in advisers:
            yield from adviser.faster_settings(case)

    def needless_sharding(case: Case) -> Iterator[Finding]:
        """Report sharding if DDP is as fast and fits. A study that already trains unsharded replicas is silent."""
        if replicated and all(
            # the ranks share the state or the layers of a replica
            ENGINES_AND_PROGRAMS[record.engine].stage_of(record.options) > 0 or record.layout.dp < record.world_size
            for record in case.records
        ):
            for adviser in advisers:
                yield from adviser.needless_sharding(replicated)

    return faster_settings, needless_sharding


@cache
def _costs(job: Job, topology: Topology) -> Costs:
    return Costs(job, topology, profile_for(topology.hosts[0].device))


@cache
def _predict(job: Job, topology: Topology, candidate: Candidate) -> Estimate | None:
    """Return the prediction, or None for an unknown peak FLOP/s."""
    try:
        return _costs(job, topology).estimate(candidate)
    except UserError:
        return None


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


def predict_trial(trial: PlannedTrial) -> Estimate | None:
    """Return the prediction of a trial that has not run, or None if the planner cannot predict the trial."""
    devices = {host.device for host in trial.topology.hosts}
    candidate = candidate_of(trial.record)
    if trial.run.device == "cpu" or len(devices) > 1 or candidate is None:
        return None
    return _predict(planned_job(trial), trial.topology, candidate)


def _adviser(trial: PlannedTrial) -> "_Adviser | None":
    """Return the adviser of a trial, or None if the planner cannot predict the trial."""
    mib = gpu_memory_mib(trial.topology.hosts[0].device)
    estimate = predict_trial(trial) if mib else None
    return _Adviser(trial, planned_job(trial), estimate, mib / 1024) if mib and estimate else None


@dataclass(frozen=True)
class _Adviser:
    """Advice for one trial. `estimate` is the prediction of the trial, and `memory_gib` the memory of a GPU."""

    trial: PlannedTrial
    job: Job
    estimate: Estimate
    memory_gib: float

    def faster_settings(self, case: Case) -> Iterator[Finding]:
        """Search precisions and micro-batches, with otherwise equal settings."""
        precision, micro_batch = now = self.job.precision, self.trial.record.micro_batch
        found = {now: self.estimate}
        for other in self._precisions(case):
            for size in self._micro_batches(case):
                candidate = replace(self.estimate.candidate, micro_batch=size)
                if not self._may_gain(candidate, other):
                    continue
                estimate = self._predict(candidate, other)
                if estimate and estimate.fits:
                    found[other, size] = estimate
        limit = _EQUAL * min(estimate.step_seconds for estimate in found.values())
        # Equally fast settings are ordered by their difference from the trial's settings, and then by their memory.
        best = next(key for key, estimate in found.items() if estimate.step_seconds <= limit)
        changes: dict[str, Any] = {"precision": best[0]} if best[0] != precision else {}
        changes |= {"micro_batch": best[1]} if best[1] != micro_batch else {}
        if self._gain(found[best]) < self._least_gain or not self._is_valid(self.trial.given.given() | changes):
            return
        alone = {best[0]: found.get((best[0], micro_batch)), f"micro-batch {best[1]}": found.get((precision, best[1]))}
        parts = [f"{name} alone {self._gain(one):.1f} ×" for name, one in alone.items() if one]
        by_part = f" ({', '.join(parts)})" if parts and len(changes) > 1 else ""
        yield Finding(
            "slow",
            (self.trial.record.trial,),
            self._what(changes),
            f"predicted for {_named(now)}: {self._numbers(self.estimate)}; predicted for {_named(best)}: "
            f"{self._numbers(found[best])}, {self._gain(found[best]):.1f} × as fast{by_part}; {self._origin}",
            f"set {' and '.join(f'{name}: {value}' for name, value in changes.items())}; this is a prediction, so "
            f"measure both",
        )

    def needless_sharding(self, replicated: PlannedEngine) -> Iterator[Finding]:
        """Compare a sharded trial with the engine `replicated`, with otherwise equal settings."""
        other = replicated.spec
        record = self.trial.record
        spec = ENGINES_AND_PROGRAMS[record.engine]
        if not spec.is_data_parallel or record.world_size == 1:
            return
        here = self.estimate.candidate
        candidate = replace(here, engine=other.name, variant=replicated.variant_of({}), is_compiled=False)
        whole = self._predict(candidate, self.job.precision)
        given = {
            name: value
            for name, value in self.trial.given.given().items()
            if not engines_with(name) or other.name in engines_with(name)
        }
        if not whole or not whole.fits or whole.step_seconds > _EQUAL * self.estimate.step_seconds:
            return
        if not self._is_valid(given | {"engine": other.name}):
            return
        mode = spec.mode(record.options) or spec.title
        state = (whole.memory.weights + whole.memory.gradients + whole.memory.optimizer) / _GIB
        yield Finding(
            "slow" if self._gain(whole) >= self._least_gain else "note",
            (record.trial,),
            f"{mode} is not needed: the weights, gradients and optimizer state fit into each GPU without sharding, and "
            f"{other.title} is predicted to be {'faster' if self._gain(whole) >= self._least_gain else 'as fast'}",
            f"predicted for {mode}: {self._numbers(self.estimate)}; predicted for {other.title}: "
            f"{self._numbers(whole)}, of which weights, gradients and optimizer state use {state:.1f} GiB; "
            f"{self._origin}",
            f"use engine: {other.name}, or add a trial {{engine: {other.name}}}; this is a prediction, so measure both",
        )

    def _predict(self, candidate: Candidate, precision: str) -> Estimate | None:
        return _predict(replace(self.job, precision=precision), self.trial.topology, candidate)

    def _may_gain(self, candidate: Candidate, precision: str) -> bool:
        """Return whether the lower bound of the step time allows a gain that is reported."""
        costs = _costs(replace(self.job, precision=precision), self.trial.topology)
        return self.estimate.step_seconds / costs.shortest(candidate) >= self._least_gain

    def _precisions(self, case: Case) -> list[str]:
        """Return the precision of the trial, and a 16-bit one after fp32 unless another trial measures it."""
        record = self.trial.record
        here = record.engine, record.layout, record.options
        if record.precision != "fp32" or any(
            other.precision != "fp32" and (other.engine, other.layout, other.options) == here for other in case.records
        ):
            return [record.precision]
        gpu = find_gpu(record.device or "")
        return ["fp32", "fp16" if gpu and gpu.bf16_tflops is None else "bf16"]

    def _micro_batches(self, case: Case) -> list[int]:
        """Return the micro-batch of the trial, and its multiples by powers of two if memory is left for them."""
        record = self.trial.record
        sizes = [record.micro_batch]
        if self._used(self.estimate) >= HALF or was_tuned(record) or is_tried_larger(case, record):
            return sizes
        while True:
            try:
                self.estimate.candidate.layout.check_batch(record.global_batch, 2 * sizes[-1])
            except LayoutError:
                return sizes
            sizes.append(2 * sizes[-1])

    def _is_valid(self, settings: Mapping[str, Any]) -> bool:
        try:
            resolve_first(RunConfig.parse(settings), self.trial.record.world_size, "cuda")
        except UserError:
            return False
        return True

    def _what(self, changes: Mapping[str, Any]) -> str:
        precision = changes.get("precision")
        if "micro_batch" not in changes:
            return f"{precision} is predicted to be faster than {self.job.precision}"
        faster = f"{precision} with a larger micro-batch" if precision else "a larger micro-batch"
        return f"most of the GPU memory is predicted to stay unused; {faster} is predicted to be faster"

    @property
    def _least_gain(self) -> float:
        return max(_LEAST_GAIN, 1 + profile_for(self.trial.topology.hosts[0].device).relative_error)

    def _gain(self, other: Estimate) -> float:
        return self.estimate.step_seconds / other.step_seconds

    def _used(self, estimate: Estimate) -> float:
        return estimate.memory.total / _GIB / self.memory_gib

    def _numbers(self, estimate: Estimate) -> str:
        """Return the predicted memory and step time as text."""
        used = f"{estimate.memory.total / _GIB:.1f} of {self.memory_gib:.0f} GiB of GPU memory"
        lacks = "" if estimate.fits else ", too much to fit"
        return f"{used} ({self._used(estimate):.0%}{lacks}), {estimate.step_seconds:.3g} s per step"

    @property
    def _origin(self) -> str:
        profile = profile_for(self.trial.topology.hosts[0].device)
        return f"the predictions of profile {profile.name} have an error of {profile.relative_error:.0%}"


def _named(settings: tuple[str, int]) -> str:
    precision, micro_batch = settings
    return f"{precision} and micro-batch {micro_batch}"
