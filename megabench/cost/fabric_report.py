"""Describe how fast a measured network is, as text and for JSON. Loads no torch."""

from collections.abc import Sequence
from typing import Any

from megabench.cost.fabric import Bandwidth, Fabric, kind_name
from megabench.hardware.topology import Topology
from megabench.parallel.placement import LINK_NAMES

SLOW_SHARE = 0.75  # a network below this share of the expected bandwidth is reported as slow


def network_name(topology: Topology) -> str:
    """Return the name of the network between the hosts, such as "EFA of p5.48xlarge"."""
    host = topology.hosts[0]
    rate = f" with {host.network_gbits:g} Gbit/s" if host.network_gbits else ""
    return LINK_NAMES[host.network] + (f" of {host.instance_type}" if host.instance_type else rate)


def gb_per_s_text(rate: float) -> str:
    """Return a bandwidth with two or more digits, such as "51 GB/s"."""
    return f"{rate:,.{0 if rate >= 10 else 1 if rate >= 1 else 2}f} GB/s"


def slowest(bandwidths: Sequence[Bandwidth]) -> Bandwidth:
    """Return the bandwidth with the smallest share of the expected one."""
    return min(bandwidths, key=lambda one: one.share)


def fabric_sentence(fabric: Fabric, bandwidths: Sequence[Bandwidth], topology: Topology) -> str:
    """Return a sentence about the collective with the smallest share of the expected bandwidth."""
    one = slowest(bandwidths)
    start, network = f"Network as measured in {fabric.source}:", network_name(topology)
    said = f"{one.collective.label} reaches {gb_per_s_text(one.measured)}, {one.share:.0%}"
    if one.share < SLOW_SHARE:
        return f"{start} {said} of what {network} should reach."
    return f"{start} as fast as {network} should be ({said})."


def describe_fabric(fabric: Fabric, bandwidths: Sequence[Bandwidth]) -> dict[str, Any]:
    """Return the bandwidths for JSON output."""
    return {
        "file": fabric.source,
        "bandwidths": [
            {
                "kind": kind_name(one.collective.kind),
                "num_hosts": one.collective.num_hosts,
                "ranks_per_host": one.collective.ranks_per_host,
                "groups_per_host": one.collective.groups_per_host,
                "num_bytes": one.collective.num_bytes,
                "gb_per_s": one.measured,
                "expected_gb_per_s": one.expected,
                "share": one.share,
            }
            for one in bandwidths
        ],
    }
