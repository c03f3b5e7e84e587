"""Diagnosis rule for planned trials on several hosts of one server, such as pods of one Kubernetes node."""

from collections.abc import Iterator, Sequence

from megabench.doctor.finding import Case, Finding, Rule
from megabench.hardware.topology import Topology
from megabench.parallel.placement import LINK_NAMES, name_list


def rule_for(trials: Sequence[tuple[str, Topology]]) -> Rule:
    """Return the rule that reports trials whose GPUs are in several hosts (pods) of one server.

    `trials` are the names of trials with their ranks' topology.
    """

    def hosts_of_one_server(case: Case) -> Iterator[Finding]:
        for name, topology in trials:
            for numbers in topology.hosts_by_server.values():
                hosts = [topology.hosts[number] for number in numbers]
                if len(hosts) < 2 or hosts[0].device == "cpu":
                    continue
                names, link = name_list([host.name for host in hosts]), LINK_NAMES[hosts[0].network]
                yield Finding(
                    "slow",
                    (name,),
                    f"{len(hosts)} hosts (pods) of one server communicate over {link} instead of NVLink or PCIe",
                    f"{names} are on {hosts[0].server}, and share its memory, CPUs and NICs",
                    "use one pod per server that requests all of its GPUs, with one process per GPU",
                )
                break

    return hosts_of_one_server
