"""Diagnosis rules for a planned study that predict other settings of its trials. Loads no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megabench.cost.job import Candidate
from megabench.doctor.finding import Case, Finding, Rule, is_tried_larger, was_tuned
from megabench.doctor.predicted_trials import PredictedTrial
from megabench.doctor.speed_rules import HALF
from megabench.hardware.gpus import find_gpu
from megabench.planner.costs import Estimate
from megabench.planner.engines.planned_engine import PlannedEngine
from megabench.planner.engines.registry import PLANNED_ENGINES
from megabench.planner.search import micro_batches_of
from megabench.specs.all_settings import engines_with
from megabench.specs.registry import ENGINES_AND_PROGRAMS

# Predictions that differ by less than this factor count as equal.
_EQUAL = 1.02
_GIB = 2**30


def rules_for(trials: Sequence[PredictedTrial]) -> tuple[Rule, ...]:
    """Return the rules that compare these trials with other settings of the same trials."""
    whole = [engine for engine in PLANNED_ENGINES.values() if engine.spec.sharding_stage == 0]
    replicated = next((engine for engine in whole if engine.spec.is_data_parallel), None)

    def faster_settings(case: Case) -> Iterator[Finding]:
        """Report fp32, and micro-batches that leave most of the GPU memory unused, if other values are faster."""
        for trial in trials:
            yield from _faster_settings(case, trial)

    def needless_sharding(case: Case) -> Iterator[Finding]:
        """Report sharding if DDP is as fast and fits. A study that already trains unsharded replicas is silent."""
        if replicated and all(
            # the ranks share the state or the layers of a replica
            ENGINES_AND_PROGRAMS[record.engine].stage_of(record.options) > 0 or record.layout.dp < record.world_size
            for record in case.records
        ):
            for trial in trials:
                yield from _needless_sharding(trial, replicated)

    return faster_settings, needless_sharding


def _faster_settings(case: Case, trial: PredictedTrial) -> Iterator[Finding]:
    """Search precisions and micro-batches, with otherwise equal settings."""
    here = trial.estimate.candidate
    precision, micro_batch = now = trial.job.precision, here.micro_batch
    found = {now: trial.estimate}
    for other in _precisions(case, trial):
        for size in _micro_batches(case, trial):
            candidate = replace(here, micro_batch=size)
            if not _may_gain(trial, candidate, other):
                continue
            estimate = _predict(trial, candidate, other)
            if estimate and estimate.fits:
                found[other, size] = estimate
    limit = _EQUAL * min(estimate.step_seconds for estimate in found.values())
    # Equally fast settings are ordered by their difference from the trial's settings, and then by their memory.
    best = next(key for key, estimate in found.items() if estimate.step_seconds <= limit)
    changes: dict[str, Any] = {"precision": best[0]} if best[0] != precision else {}
    changes |= {"micro_batch": best[1]} if best[1] != micro_batch else {}
    gain = trial.gain(found[best])
    if gain < trial.least_gain or not trial.is_valid(trial.trial.given.given() | changes):
        return
    alone = {best[0]: found.get((best[0], micro_batch)), f"micro-batch {best[1]}": found.get((precision, best[1]))}
    parts = [f"{name} alone {trial.gain(one):.1f} ×" for name, one in alone.items() if one]
    by_part = f" ({', '.join(parts)})" if parts and len(changes) > 1 else ""
    yield Finding(
        "slow",
        (trial.name,),
        _what(precision, changes),
        f"predicted for {_named(now)}: {trial.numbers(trial.estimate)}; predicted for {_named(best)}: "
        f"{trial.numbers(found[best])}, {gain:.1f} × as fast{by_part}; {trial.origin}",
        f"set {' and '.join(f'{name}: {value}' for name, value in changes.items())}; this is a prediction, so measure "
        f"both",
    )


def _needless_sharding(trial: PredictedTrial, replicated: PlannedEngine) -> Iterator[Finding]:
    """Compare a sharded trial with the engine `replicated`, with otherwise equal settings."""
    other, record = replicated.spec, trial.trial.record
    spec = ENGINES_AND_PROGRAMS[record.engine]
    if not spec.is_data_parallel or record.world_size == 1:
        return
    here = trial.estimate.candidate
    candidate = replace(here, engine=other.name, variant=replicated.variant_of({}), is_compiled=False)
    whole = _predict(trial, candidate, trial.job.precision)
    given = {
        name: value
        for name, value in trial.trial.given.given().items()
        if not engines_with(name) or other.name in engines_with(name)
    }
    if not whole or not whole.fits or whole.step_seconds > _EQUAL * trial.estimate.step_seconds:
        return
    if not trial.is_valid(given | {"engine": other.name}):
        return
    mode, is_faster = spec.mode(record.options) or spec.title, trial.gain(whole) >= trial.least_gain
    state = (whole.memory.weights + whole.memory.gradients + whole.memory.optimizer) / _GIB
    yield Finding(
        "slow" if is_faster else "note",
        (record.trial,),
        f"{mode} is not needed: the weights, gradients and optimizer state fit into each GPU without sharding, and "
        f"{other.title} is predicted to be {'faster' if is_faster else 'as fast'}",
        f"predicted for {mode}: {trial.numbers(trial.estimate)}; predicted for {other.title}: "
        f"{trial.numbers(whole)}, of which weights, gradients and optimizer state use {state:.1f} GiB; {trial.origin}",
        f"use engine: {other.name}, or add a trial {{engine: {other.name}}}; this is a prediction, so measure both",
    )


def _predict(trial: PredictedTrial, candidate: Candidate, precision: str) -> Estimate | None:
    return trial.predictions.estimate(replace(trial.job, precision=precision), trial.trial.topology, candidate)


def _may_gain(trial: PredictedTrial, candidate: Candidate, precision: str) -> bool:
    """Return whether the lower bound of the step time allows a gain that is reported."""
    costs = trial.predictions.costs(replace(trial.job, precision=precision), trial.trial.topology)
    return trial.estimate.step_seconds / costs.shortest(candidate) >= trial.least_gain


def _precisions(case: Case, trial: PredictedTrial) -> list[str]:
    """Return the precision of the trial, and a 16-bit one after fp32 unless another trial measures it."""
    record = trial.trial.record
    here = record.engine, record.layout, record.options
    if record.precision != "fp32" or any(
        other.precision != "fp32" and (other.engine, other.layout, other.options) == here for other in case.records
    ):
        return [record.precision]
    gpu = find_gpu(record.device or "")
    return ["fp32", "fp16" if gpu and gpu.bf16_tflops is None else "bf16"]


def _micro_batches(case: Case, trial: PredictedTrial) -> list[int]:
    """Return the micro-batch of the trial, and the larger ones of a plan if memory is left for them."""
    record, here = trial.trial.record, trial.estimate.candidate
    if trial.used(trial.estimate) >= HALF or was_tuned(record) or is_tried_larger(case, record):
        return [here.micro_batch]
    larger = (size for size in micro_batches_of(trial.job, here.layout) if size > here.micro_batch)
    return [here.micro_batch, *larger]


def _what(precision: str, changes: Mapping[str, Any]) -> str:
    other = changes.get("precision")
    if "micro_batch" not in changes:
        return f"{other} is predicted to be faster than {precision}"
    faster = f"{other} with a larger micro-batch" if other else "a larger micro-batch"
    return f"most of the GPU memory is predicted to stay unused; {faster} is predicted to be faster"


def _named(settings: tuple[str, int]) -> str:
    precision, micro_batch = settings
    return f"{precision} and micro-batch {micro_batch}"
