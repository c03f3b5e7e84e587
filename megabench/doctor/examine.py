"""Table of all diagnosis rules, and the function that applies them to a study."""

from collections.abc import Iterable, Sequence

from megabench.doctor import failure_rules, fairness_rules, machine_rules, network_rules, speed_rules, timing_rules
from megabench.doctor.finding import KINDS, Case, Finding, Rule, joined
from megabench.record import RunRecord

# Within each kind of finding, the rules are ordered from the most to the least severe problem.
RULES: tuple[Rule, ...] = (
    failure_rules.lost_reference,
    failure_rules.diverged,
    failure_rules.failed,
    failure_rules.hung,
    failure_rules.out_of_memory,
    fairness_rules.precision,
    fairness_rules.fp8_without_bf16,
    fairness_rules.gradient_dtype,
    fairness_rules.other_work,
    fairness_rules.kernels,
    fairness_rules.weaker_reference,
    fairness_rules.untuned_reference,
    fairness_rules.gathers_by_parts,
    fairness_rules.gathers_twice,
    fairness_rules.losses_that_stand_still,
    fairness_rules.skipped_steps,
    timing_rules.warm_up,
    timing_rules.too_few_steps,
    timing_rules.repeats,
    machine_rules.other_processes,
    machine_rules.throttled,
    machine_rules.stragglers,
    network_rules.sockets_for_efa,
    network_rules.sockets_for_infiniband,
    network_rules.slow_transport,
    network_rules.hosts_that_nccl_counts,
    network_rules.tensor_parallel_group,
    network_rules.nic_distance,
    speed_rules.fp32,
    speed_rules.unfused,
    speed_rules.slow_attention,
    speed_rules.environment,
    speed_rules.small_micro_batch,
    speed_rules.unused_memory,
    speed_rules.recomputed_for_nothing,
    speed_rules.offloaded_for_nothing,
    speed_rules.bubble,
    speed_rules.idle_gpus,
    speed_rules.needless_sharding,
    machine_rules.power_limit,
    timing_rules.too_close,
    timing_rules.one_run,
    fairness_rules.reference_is_not_zero3,
    machine_rules.small_shm,
    machine_rules.lost_compile_cache,
)


def examine(
    records: Sequence[RunRecord], reference: str, more_rules: Sequence[Rule] = (), unbeaten: Iterable[str] = ()
) -> list[Finding]:
    """Return the findings for the records of a study with the baseline trial `reference`, most severe first.

    `more_rules` apply to this study only. `unbeaten` are the names of planned trials that no layout of
    the plan beats.
    """
    case = Case(tuple(records), reference, frozenset(unbeaten))
    found = [finding for rule in (*RULES, *more_rules) for finding in joined(rule(case))]
    return sorted(found, key=lambda finding: KINDS.index(finding.kind))
