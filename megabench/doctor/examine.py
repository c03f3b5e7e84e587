"""All rules in one table, and what they find in a study."""

from collections.abc import Sequence

from megabench.doctor import ends, machine, network, same_work, speed, timing
from megabench.doctor.finding import KINDS, Case, Finding, Rule, joined
from megabench.record import RunRecord

# worst first, within each kind of finding
RULES: tuple[Rule, ...] = (
    ends.lost_reference,
    ends.diverged,
    ends.failed,
    ends.hung,
    ends.out_of_memory,
    same_work.precision,
    same_work.gradient_dtype,
    same_work.other_work,
    same_work.kernels,
    same_work.weaker_reference,
    same_work.untuned_reference,
    same_work.gathers_by_parts,
    same_work.gathers_twice,
    same_work.losses_that_stand_still,
    same_work.skipped_steps,
    timing.warm_up,
    timing.too_few_steps,
    timing.repeats,
    machine.other_processes,
    machine.throttled,
    network.sockets_for_efa,
    network.sockets_for_infiniband,
    network.slow_transport,
    network.hosts_that_nccl_counts,
    network.tensor_parallel_group,
    network.nic_distance,
    speed.fp32,
    speed.unfused,
    speed.environment,
    speed.small_micro_batch,
    speed.unused_memory,
    speed.recomputed_for_nothing,
    speed.offloaded_for_nothing,
    speed.bubble,
    speed.idle_gpus,
    speed.needless_sharding,
    machine.power_limit,
    timing.too_close,
    timing.one_run,
    same_work.reference_is_not_zero3,
    machine.small_shm,
    machine.lost_compile_cache,
)


def examine(records: Sequence[RunRecord], reference: str) -> list[Finding]:
    """What is wrong with the records of a study whose ratios go by the trial `reference`, worst first."""
    case = Case(tuple(records), reference)
    found = [finding for rule in RULES for finding in joined(rule(case))]
    return sorted(found, key=lambda finding: KINDS.index(finding.kind))
