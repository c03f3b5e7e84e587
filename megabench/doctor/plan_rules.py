"""Records of a planned study: the requested settings of every run, without measurements. Rules of the planner."""

from dataclasses import replace
from pathlib import Path

from megabench.config.clusters import read_cluster
from megabench.config.requested_fields import auto_fields, requested_fields
from megabench.doctor.finding import Rule
from megabench.doctor.planner_rules import PlannedTrial, rules_for
from megabench.hardware.facts import read_facts, visible_gpus
from megabench.hardware.topology import Host, Topology, build, from_facts, split
from megabench.parallel.groups import groups_on
from megabench.parallel.placement import place
from megabench.record import Environment, PlacementUsed, RunRecord
from megabench.study.compare_request import Request
from megabench.study.study import Study, StudyFile, Trial, plan_study


def plan(source: Path, num_processes: int | None, cluster: str | None) -> tuple[list[RunRecord], str, tuple[Rule, ...]]:
    """Return the planned records of the study file `source`, the name of its reference trial, and the planner's rules.

    With `cluster` (TYPE:COUNT[:GPUS], or a file), plan one process on each GPU of the cluster; otherwise plan for this
    machine. Raises UserError if the study cannot be run.
    """
    if cluster:
        topology = read_cluster(cluster)
        study = plan_study(StudyFile.read(source), source, num_processes or topology.world_size, "cuda")
    else:
        study, size = Request(source, Path()).plan_here(num_processes)
        topology = _this_machine(study, size)
    trials = [_planned(trial, topology) for trial in study.trials]
    records = [
        planned.record.model_copy(update={"repeat": repeat})
        for trial, planned in zip(study.trials, trials, strict=True)
        for repeat in range(trial.repeats)
    ]
    return records, study.reference, rules_for(trials)


def _planned(trial: Trial, topology: Topology) -> PlannedTrial:
    """Place a trial on the first ranks of `topology`."""
    run = trial.resolved
    here = _first_ranks(topology, trial.world_size)
    if run.emulate_hosts:
        here = split(here, run.emulate_hosts)
    placed = place(here, run.layout, run.placement)
    record = RunRecord(
        **requested_fields(run, trial.config),
        **auto_fields(trial.config),
        trial=trial.name,
        trial_id=trial.id,
        work_class=None,
        status="ok",
        num_hosts=len(here.hosts),
        device=here.hosts[0].device if run.device == "cuda" else "cpu",
        placement=PlacementUsed(policy=placed.policy, launcher_ranks=list(placed.launcher_ranks), hosts=[]),
        groups=groups_on(run.layout, placed.topology),
        environment=Environment(versions={}, variables=trial.env),
    )
    return PlannedTrial(record, trial.config, run, here)


def _first_ranks(topology: Topology, size: int) -> Topology:
    """Return the part of the topology with the first `size` ranks and their hosts."""
    used = sorted(set(topology.host_of[:size]))
    return replace(
        topology,
        hosts=tuple(topology.hosts[number] for number in used),
        host_of=tuple(used.index(number) for number in topology.host_of[:size]),
        domain_of=topology.domain_of[:size],
        seat_of=topology.seat_of[:size],
    )


def _this_machine(study: Study, size: int) -> Topology:
    gpus = visible_gpus()
    if any(trial.resolved.device == "cuda" for trial in study.trials):
        return from_facts([read_facts(rank, uuid) for rank, (uuid, _) in enumerate(gpus[:size])])
    return on_cpu(size)


def on_cpu(size: int) -> Topology:
    """Return the topology of one host without GPUs that runs `size` processes."""
    return build([(Host("this machine", "cpu", "shm", "socket"), size, size)])
