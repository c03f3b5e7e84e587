"""Records of a planned study: the requested settings of every run, without measurements. Rules of the planner."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from megabench.config.clusters import read_cluster
from megabench.config.record_fields import auto_fields, requested_fields
from megabench.cost.fabric import Fabric
from megabench.cost.job import Job
from megabench.cost.profile import profile_for
from megabench.doctor import best_plan_rules, planner_rules, server_rules
from megabench.doctor.fabric_rules import NetworkUser, rule_for
from megabench.doctor.finding import Rule
from megabench.doctor.predicted_trials import PlannedTrial, Predictions, planned_job, predict
from megabench.errors import UserError
from megabench.hardware.facts import read_facts, visible_gpus
from megabench.hardware.gpus import find_instance
from megabench.hardware.topology import Host, Topology, build, from_facts, split
from megabench.parallel.placement import groups_on, place
from megabench.planner.predict import job_of
from megabench.record import Environment, PlacementUsed, RunRecord
from megabench.study.compare_request import Request
from megabench.study.study import StudyFile, Trial, plan_study


def plan(
    source: Path, num_processes: int | None, cluster: str | None, fabric: Fabric | None = None
) -> tuple[list[RunRecord], str, tuple[Rule, ...], list[str]]:
    """Return the planned records of a study file, its reference, the planner's rules, and its unbeaten trials.

    With `cluster` (TYPE:COUNT[:GPUS], or a file), plan one process on each GPU of the cluster; otherwise plan for this
    machine. `fabric` is the measured network of the cluster. Raises UserError if the study cannot be run.
    """
    if cluster:
        topology = read_cluster(cluster)
        size = num_processes or topology.world_size
        study = plan_study(StudyFile.read(source), source, size, "cuda")
    else:
        study, size = Request(source, Path()).plan_here(num_processes)
        if any(trial.resolved.device == "cuda" for trial in study.trials):
            topology = from_facts([read_facts(rank, uuid) for rank, (uuid, _) in enumerate(visible_gpus()[:size])])
        else:
            topology = on_cpu(size)
    trials = [place_trial(trial, topology) for trial in study.trials]
    records = [
        planned.record.model_copy(update={"repeat": repeat})
        for trial, planned in zip(study.trials, trials, strict=True)
        for repeat in range(trial.repeats)
    ]
    predictions = Predictions()
    if fabric:
        fabric.check_fit(topology)
        predictions = Predictions(fabric.profile_on(profile_for(topology.hosts[0].device), topology))
    predicted = [one for trial in trials if (one := predict(trial, predictions))]
    base = StudyFile.read(source).defaults
    rules = (
        best_plan_rules.refused(trials, predictions.refusals),
        *best_plan_rules.rules_for(predicted, base, size),
        *planner_rules.rules_for(predicted),
        server_rules.rule_for([(trial.record.trial, trial.topology) for trial in trials]),
    )
    if fabric:
        rules += (rule_for(fabric, _network_users((one.record, planned_job(one), one.topology) for one in trials)),)
    return records, study.reference, rules, [trial.name for trial in predicted if trial.is_unbeaten]


def rule_for_records(records: Sequence[RunRecord], fabric: Fabric, cluster: str | None) -> Rule:
    """Return the rule about the measured network of finished runs.

    By default, the hosts have the instance type that the records name. Raises UserError if the records name none, or if
    the fabric does not describe the network of the hosts.
    """
    topology = read_cluster(cluster or _cluster_of(records))
    fabric.check_fit(topology)
    return rule_for(
        fabric,
        _network_users(
            (record, job_of(record), _first_ranks(topology, record.world_size))
            for record in records
            if record.status == "ok" and record.world_size <= topology.world_size
        ),
    )


def _cluster_of(records: Sequence[RunRecord]) -> str:
    """Return the cluster of the run on the most hosts, as TYPE:COUNT:GPUS."""
    widest = max(records, key=lambda record: record.num_hosts or 1)
    types = {machine.instance_type for machine in widest.machines}
    instance = find_instance(types.pop() or "") if len(types) == 1 else None
    if instance is None:
        raise UserError(
            "--fabric needs the type of the hosts, but the records name no known instance type. Use --cluster with the "
            "cluster that ran the study."
        )
    num_hosts = widest.num_hosts or 1
    return f"{instance.name}:{num_hosts}:{widest.world_size // num_hosts}"


def _network_users(trials: Iterable[tuple[RunRecord, Job, Topology]]) -> list[NetworkUser]:
    """Return the trials that ran on several hosts, without those on emulated hosts."""
    users = [NetworkUser(*trial) for trial in trials if len(trial[2].hosts) > 1]
    return [user for user in users if not user.topology.emulated and not user.record.emulated_hosts]


def place_trial(trial: Trial, topology: Topology) -> PlannedTrial:
    """Place a trial on the first ranks of `topology`. Raises UserError if the topology has fewer ranks."""
    run = trial.resolved
    if trial.world_size > topology.world_size:
        raise UserError(
            f"trial {trial.name} needs {trial.world_size} processes, but the cluster has {topology.world_size} GPUs. "
            f"Use a larger --cluster."
        )
    here = _first_ranks(topology, trial.world_size)
    if run.emulate_hosts:
        here = split(here, run.emulate_hosts, run.emulate_network.gb_per_s if run.emulate_network else None)
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


def on_cpu(size: int) -> Topology:
    """Return the topology of one host without GPUs that runs `size` processes."""
    return build([(Host("this machine", "cpu", "shm", "socket"), size, size)])
