"""Diagnosis rule for a network that `--fabric` measured: report it if it is slower than expected. Loads no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megabench.cost.fabric import Fabric
from megabench.cost.fabric_report import SLOW_SHARE, gb_per_s_text, network_name
from megabench.cost.job import Job
from megabench.cost.profile import Profile, profile_for
from megabench.doctor.finding import Case, Finding, Rule
from megabench.errors import UserError
from megabench.hardware.gpus import Network
from megabench.hardware.topology import Topology
from megabench.planner.costs import Costs
from megabench.planner.predict import candidate_of
from megabench.record import RunRecord

_REMEDIES: dict[Network, str] = {
    "efa": "check the EFA driver and aws-ofi-nccl on every host (fi_info -p efa; NCCL_DEBUG=INFO shows NET/Libfabric "
    "and GDRDMA)",
    "infiniband": "check the driver and the ports on every host (ibstat; NCCL_DEBUG=INFO shows NET/IB and GDRDMA)",
    "socket": "check NCCL_SOCKET_IFNAME and the speed of the interface (ethtool)",
}
_MORE = "measure pairs of hosts to find a slow one; see docs/troubleshooting.md"


@dataclass(frozen=True)
class NetworkUser:
    """A trial whose ranks are on several hosts: its record, its job and the ranks that it uses."""

    record: RunRecord
    job: Job
    topology: Topology


def rule_for(fabric: Fabric, users: Sequence[NetworkUser]) -> Rule:
    """Return the rule that reports a slow network, with the largest predicted slowdown of a trial."""

    def slow_network(case: Case) -> Iterator[Finding]:
        if not users:
            return
        topology = max((user.topology for user in users), key=lambda topology: len(topology.hosts))
        host = topology.hosts[0]
        slow = [one for one in fabric.bandwidths(profile_for(host.device), topology) if one.share < SLOW_SHARE]
        if not slow:
            return
        reached = [
            f"{one.collective.label} reaches {gb_per_s_text(one.measured)} of {gb_per_s_text(one.expected)} "
            f"({one.share:.0%})"
            for one in slow
        ]
        fitted = cache(lambda topology: fabric.profile_on(profile_for(host.device), topology))
        slowdowns = {
            user.record.trial: slowdown for user in users if (slowdown := _slowdown(user, fitted(user.topology)))
        }
        worst = max(slowdowns, key=slowdowns.__getitem__, default=None)
        effect = f"; predicted: a step of {worst} takes {slowdowns[worst]:.2f} × as long" if worst else ""
        yield Finding(
            "slow",
            tuple(dict.fromkeys(user.record.trial for user in users)),
            f"the network between hosts is slower than expected for {network_name(topology)}",
            f"{fabric.source}: {', '.join(reached)}{effect}",
            f"{_REMEDIES[host.network]}; {_MORE}",
        )

    return slow_network


def _slowdown(user: NetworkUser, measured_network: Profile) -> float | None:
    """Return the predicted step time with the measured network ÷ that with the expected one, or None if unknown."""
    profiles = measured_network, profile_for(user.topology.hosts[0].device)
    candidate = candidate_of(user.record)
    if candidate is None:
        return None
    try:
        measured, before = (Costs(user.job, user.topology, profile).estimate(candidate) for profile in profiles)
    except UserError:  # the peak FLOP/s of the GPU is unknown
        return None
    return measured.step_seconds / before.step_seconds
