"""Rank all candidates for a job on a cluster. Loads no torch."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from megabench.config import FIELDS, ConfigError
from megabench.cost.fabric import Bandwidth, Fabric
from megabench.cost.job import Candidate, Job, Recompute, Variant
from megabench.cost.profile import Profile
from megabench.hardware.topology import Topology
from megabench.parallel.layout import Layout, LayoutError, divisors
from megabench.parallel.placement import Policy
from megabench.planner.costs import Costs, Estimate
from megabench.planner.engines.planned_engine import PlannedEngine
from megabench.planner.engines.registry import PLANNED_ENGINES
from megabench.precision import FP8_MULTIPLE
from megabench.specs.fp8_check import odd_size

_MOST_CP = 16
_MOST_LAYERS = 1000  # the search takes seconds for 1,000 layers, and a time quadratic in their number
# Unequal model chunks may have at most this fraction more layers if all of them were as long as the longest.
_MOST_UNEVEN = 0.1
_SEQUENCE_MULTIPLES = [FP8_MULTIPLE * cp for cp in (1, 2, 4, 8, _MOST_CP)]  # every rank's part is a multiple of 16
_MOST_RISKY = 3  # number of faster layouts to name that may not fit
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
# A second layout is named if the recommended one needs more than the first share of a GPU's memory. The second layout
# needs less than the recommended one by at least the second share.
_MOST_CERTAIN, _LESS_MEMORY = 0.75, 0.15


@dataclass(frozen=True)
class MeasuredNetwork:
    """A measured network.

    `expected` is the profile with the network costs that are shipped for this GPU. `bandwidths` compares the
    measurements with it.
    """

    fabric: Fabric
    expected: Profile
    bandwidths: list[Bandwidth]


@dataclass(frozen=True)
class Plan:
    """The result of the search: the best candidates, the best of each other engine, and candidates that do not fit.

    The first item of `ranked` is the recommended candidate: the fastest one that is likely to fit. The other candidates
    follow from fast to slow, one of each family. `merged` maps the name of a ranked candidate to the names of equally
    fast variants with another cp. `equals` is the number of first candidates whose predictions differ from the fastest
    by less than the prediction error.

    `fallback` is the fastest candidate that needs noticeably less memory than the recommended one, for a run that runs
    out of memory, or None if the recommended one leaves much memory free or no candidate needs less.
    `risky` contains faster candidates that may not fit; `baselines` the fastest candidate of each data-parallel kind
    that is likely to fit; `misfits` the candidates that are not likely to fit, sorted by missing memory. `network` is
    the measured network that the profile includes. `assumes_sockets` is True if the cluster's description does not name
    the network between its hosts.
    """

    job: Job
    topology: Topology
    profile: Profile
    num_candidates: int
    num_fitting: int
    ranked: list[Estimate]
    merged: dict[str, list[str]]
    fallback: Estimate | None
    risky: list[Estimate]
    baselines: list[Estimate]
    misfits: list[Estimate]
    usable_bytes: float
    network: MeasuredNetwork | None = None
    assumes_sockets: bool = False

    @cached_property
    def costs(self) -> Costs:
        """The cost model with which any candidate of the plan can be predicted."""
        return Costs(self.job, self.topology, self.profile)

    @property
    def equals(self) -> int:
        limit = self.ranked[0].step_seconds * (1 + self.profile.relative_error) if self.ranked else 0.0
        return sum(estimate.step_seconds <= limit for estimate in self.ranked)


def plan(job: Job, topology: Topology, profile: Profile, keep: int = 12) -> Plan:
    """Predict every candidate, and return the fastest ones that are likely to fit.

    Timelines are simulated in the order of a lower bound, until the bound exceeds the `keep`-th best time.
    """
    if job.shape.num_layers > _MOST_LAYERS:
        raise ConfigError(
            f"num_layers={job.shape.num_layers} is more than the {_MOST_LAYERS} layers for which layouts are searched; "
            f"use num_layers ≤ {_MOST_LAYERS}"
        )
    refuse_several_gpus(topology)
    costs = Costs(job, topology, profile)
    sweeps = list(_micro_batch_sweeps(job, topology))
    if not sweeps:
        raise ConfigError(_why_no_candidates(job, topology))
    missing = list(_missing_bytes(costs, sweeps))
    fitting = _bounded(costs, [candidate for bytes_, candidate in missing if bytes_ <= 0])
    ranked, merged = _merged(costs, _fastest(costs, fitting, keep))
    may_fit = [candidate for bytes_, candidate in missing if bytes_ > 0 and costs.may_fit(bytes_)]
    slowest = ranked[0].step_seconds if ranked else math.inf
    risky = _fastest(costs, [pair for pair in _bounded(costs, may_fit) if pair[0] < slowest], _MOST_RISKY)
    kinds: dict[object, list[tuple[float, Candidate]]] = {}
    for bound, candidate in fitting:
        if PLANNED_ENGINES[candidate.engine].spec.is_data_parallel:
            kinds.setdefault((candidate.engine, candidate.variant.kind), []).append((bound, candidate))
    baselines = [estimate for members in kinds.values() for estimate in _fastest(costs, members, 1)]
    nearest = sorted((pair for pair in missing if pair[0] > 0), key=lambda pair: pair[0])
    return Plan(
        job=job,
        topology=topology,
        profile=profile,
        num_candidates=sum(map(len, sweeps)),
        num_fitting=len(fitting),
        ranked=ranked[:keep],
        merged=merged,
        fallback=_fallback(costs, fitting, ranked[0]) if ranked else None,
        risky=[estimate for estimate in risky if estimate.step_seconds < slowest][:_MOST_RISKY],
        baselines=sorted(baselines, key=lambda estimate: estimate.step_seconds),
        misfits=[costs.estimate(candidate) for _, candidate in _one_of_each(nearest)],
        usable_bytes=costs.usable_bytes,
    )


def refuse_several_gpus(topology: Topology) -> None:
    """Raise ConfigError if the cluster has GPUs of several types."""
    devices = sorted({host.device for host in topology.hosts})
    if len(devices) > 1:
        raise ConfigError(f"the cluster has {' and '.join(devices)}; use a cluster with one type of GPU")


def _why_no_candidates(job: Job, topology: Topology) -> str:
    """Return why a job has no candidates: the sizes of its fp8 matrices, or the number of GPUs."""
    in_bf16 = next(candidates(replace(job, precision="bf16"), topology), None)
    if job.has_fp8_products and in_bf16:
        said = odd_size(job.shape, in_bf16.layout, in_bf16.micro_batch, job.seq_length)
        longer = [math.ceil(job.seq_length / multiple) * multiple for multiple in _SEQUENCE_MULTIPLES]
        works = [length for length in longer if any(candidates(replace(job, seq_length=length), topology))]
        remedies = [f"seq_length={length}" for length in works[:1]] + ["precision=bf16"]
        return f"precision={job.precision} needs multiples of {FP8_MULTIPLE}, but {said}; use {', or '.join(remedies)}"
    return (
        f"{topology.world_size} GPUs cannot divide {job.shape.name} with seq_length={job.seq_length} and "
        f"global_batch={job.global_batch}; use a global batch that is a multiple of the number of GPUs, e.g. "
        f"{math.ceil(job.global_batch / topology.world_size) * topology.world_size}"
    )


def _missing_bytes(costs: Costs, sweeps: list[list[Candidate]]) -> Iterator[tuple[float, Candidate]]:
    """Yield the candidates of all sweeps with the memory that a GPU lacks, up to the first of a sweep that cannot fit.

    Memory grows with the micro-batch, and does not depend on the placement.
    """
    missing: list[float] = []
    for sweep in sweeps:
        if sweep[0].placement == "topology":  # the other placements of a layout follow
            missing = list(_missing_of(costs, sweep))
        yield from zip(missing, sweep, strict=False)


def _missing_of(costs: Costs, sweep: list[Candidate]) -> Iterator[float]:
    """Yield the memory that a GPU lacks for the candidates of a sweep.

    The search tries all micro-batches of data parallelism, because without gradient accumulation, ZeRO-1 frees
    activations before it stores gradients.
    """
    for candidate in sweep:
        missing = costs.missing_bytes(candidate)
        yield missing
        if not costs.may_fit(missing) and not PLANNED_ENGINES[candidate.engine].spec.is_data_parallel:
            return


def _bounded(costs: Costs, members: list[Candidate]) -> list[tuple[float, Candidate]]:
    """Return the candidates with a lower bound of their step times, sorted by it."""
    return sorted(((costs.shortest(candidate), candidate) for candidate in members), key=lambda pair: pair[0])


def _fastest(costs: Costs, members: list[tuple[float, Candidate]], keep: int) -> list[Estimate]:
    """Return the fastest candidate of each family, from fast to slow, for at least `keep` families without their cp."""
    best: dict[object, Estimate] = {}
    rows: dict[object, float] = {}
    for bound, candidate in members:
        if len(rows) >= keep and bound > sorted(rows.values())[keep - 1]:
            break
        family, row = _family(candidate), _family_without_cp(candidate)
        if family in best and bound >= best[family].step_seconds:
            continue
        estimate = costs.estimate(candidate)
        if family not in best or estimate.step_seconds < best[family].step_seconds:
            best[family] = estimate
            rows[row] = min(rows.get(row, math.inf), estimate.step_seconds)
    return sorted(best.values(), key=lambda estimate: estimate.step_seconds)


def fastest(costs: Costs, members: Iterable[Candidate]) -> Estimate | None:
    """Return the fastest of some candidates, whether they fit or not, or None if there are none."""
    return next(iter(_fastest(costs, _bounded(costs, list(members)), 1)), None)


def _merged(costs: Costs, families: list[Estimate]) -> tuple[list[Estimate], dict[str, list[str]]]:
    """Return the estimates to show, and the names of the variants that each of them represents.

    A variant with another cp is represented if it is equally fast within the prediction error.
    """
    ranked: list[Estimate] = []
    merged: dict[str, list[str]] = {}
    for estimate in families:
        kind, limit = _family_without_cp(estimate.candidate), estimate.step_seconds / (1 + costs.profile.relative_error)
        same = (one for one in ranked if _family_without_cp(one.candidate) == kind and one.step_seconds >= limit)
        if (represented := next(same, None)) is not None:
            merged.setdefault(represented.candidate.name, []).append(estimate.candidate.name)
        else:
            ranked.append(estimate)
    return ranked, merged


def _fallback(costs: Costs, fitting: list[tuple[float, Candidate]], best: Estimate) -> Estimate | None:
    """Return the fastest candidate that needs noticeably less memory than the best one, if that may be needed."""
    if best.memory.total <= _MOST_CERTAIN * costs.available_bytes:
        return None
    most = (1 - _LESS_MEMORY) * best.memory.total
    small = [(bound, candidate) for bound, candidate in fitting if costs.memory(candidate).total <= most]
    return next(iter(_fastest(costs, small, 1)), None)


def _family(candidate: Candidate) -> tuple[object, ...]:
    """Return the family of a candidate.

    Candidates of a family differ only in micro-batch, chunks per stage and recomputation.
    """
    return candidate.layout.cp, *_family_without_cp(candidate)


def _family_without_cp(candidate: Candidate) -> tuple[object, ...]:
    layout = candidate.layout
    return layout.tp, layout.pp, candidate.placement, candidate.engine, candidate.variant


def _one_of_each(nearest: list[tuple[float, Candidate]], most: int = 6) -> list[tuple[float, Candidate]]:
    """Return the candidate with the least missing memory of the first few families."""
    found: dict[object, tuple[float, Candidate]] = {}
    for missing, candidate in nearest:
        if candidate.placement != "topology":
            continue  # the memory is the same under every placement
        found.setdefault(_family_without_cp(candidate), (missing, candidate))
        if len(found) == most:
            break
    return list(found.values())


def candidates(job: Job, topology: Topology) -> Iterator[Candidate]:
    """Yield every valid candidate for a job that uses all GPUs of a topology. Data-parallel engines come last."""
    return chain.from_iterable(_micro_batch_sweeps(job, topology))


def _micro_batch_sweeps(job: Job, topology: Topology) -> Iterator[list[Candidate]]:
    """Yield the candidates in lists of those that differ only in their micro-batch, in ascending order.

    The lists of a layout's placements follow each other, with the placement by topology first.
    """
    has_blocks = job.shape.table.has_parallel_blocks
    engines = [engine for engine in PLANNED_ENGINES.values() if has_blocks or not engine.spec.needs_blocks]
    inside = _ranks_inside(topology)
    for engine in sorted(engines, key=lambda engine: engine.spec.is_data_parallel):
        for layout, policies in _layouts(engine, job, topology):
            micro_batches = micro_batches_of(job, layout)
            if not micro_batches:
                continue
            for recompute, variant in _variants(engine, job, inside, layout):
                for policy in policies:
                    yield [
                        Candidate(engine.spec.name, layout, micro_batch, variant, recompute, policy)
                        for micro_batch in micro_batches
                    ]


def _layouts(engine: PlannedEngine, job: Job, topology: Topology) -> Iterator[tuple[Layout, tuple[Policy, ...]]]:
    """Yield the layouts of an engine that can divide the model, with the placements that differ."""

    def sizes(axis: str, number: int, limit: int | None = None) -> list[int]:
        return divisors(number, limit) if axis in engine.spec.axes else [1]

    world, shape = topology.world_size, job.shape
    # with one NVLink domain, or one GPU per domain, the policies "spread-tp" and "topology" place ranks equally
    can_spread = 1 < len(set(topology.domain_of)) < world
    for tp in sizes("tp", world):
        for cp in sizes("cp", world // tp, _MOST_CP):
            for pp in sizes("pp", world // (tp * cp)):
                for vp in _chunk_counts(shape.num_layers, pp) if pp > 1 and "vp" in engine.spec.axes else [1]:
                    if layout := _checked(Layout(tp=tp, cp=cp, pp=pp, vp=vp), job, world):
                        yield layout, ("topology", "spread-tp") if tp > 1 and can_spread else ("topology",)


def _chunk_counts(num_layers: int, pp: int) -> list[int]:
    """Return the numbers of model chunks per stage worth considering, in ascending order.

    Each is the smallest number of chunks that have at most 1, 2, 3, … layers. Stages wait for the longest of the chunks
    that run at the same time, so a number is left out if the longest chunks on all stages exceed the model's layers by
    more than `_MOST_UNEVEN`.
    """
    found = {1}
    for longest in range(1, math.ceil(num_layers / pp)):
        vp = math.ceil(num_layers / (pp * longest))
        if longest * pp * vp <= (1 + _MOST_UNEVEN) * num_layers:
            found.add(vp)
    return sorted(found)


def _checked(layout: Layout, job: Job, world_size: int) -> Layout | None:
    """Return the layout with its dp, or None if it cannot divide the model."""
    try:
        layout.check_model(job.shape, job.seq_length)
        return layout.with_world_size(world_size)
    except LayoutError:
        return None


def micro_batches_of(job: Job, layout: Layout) -> list[int]:
    """Return all micro-batches of a layout that the global batch and the precision allow, in ascending order."""
    allowed = layout.micro_batches(job.global_batch)
    if not job.has_fp8_products:
        return allowed
    return [size for size in allowed if not odd_size(job.shape, layout, size, job.seq_length)]


def _ranks_inside(topology: Topology) -> int | None:
    """Return the ranks per host for sharding inside hosts, or None if that differs from no other sharding."""
    world, per_host = topology.world_size, max(Counter(topology.node_of).values())
    return per_host if per_host < world and world % per_host == 0 and per_host > 1 else None


def _variants(
    engine: PlannedEngine, job: Job, inside: int | None, layout: Layout
) -> Iterator[tuple[Recompute, Variant]]:
    """Yield all combinations of an engine's recomputation levels and of its variants that have the job's optimizer."""
    trained = [
        variant
        for variant in engine.variants(job, inside, layout)
        if engine.spec.has_optimizer(job.optimizer, engine.settings_of(variant))
    ]
    for recompute in RECOMPUTES:
        if recompute in engine.spec.recompute:
            for variant in trained:
                yield recompute, variant


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
