"""Published collective timings for the fit of the link constants. This module does not import torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from megabench.cost.fabric import Collective, Kind
from megabench.hardware.topology import Host
from tools.planner_validation.published import read_table

# Message sizes of the tests of one cluster's nodes, whose operators publish the bandwidths without the size. A plot of
# the same tests is titled "size=256MB". With this size, the tests on one and two nodes agree with other published tests
# of such nodes. On more nodes, only 1 GiB agrees with the runs on the same nodes: with 16 and 32 tensor-parallel ranks,
# a collective takes 41 µs per hop, as all-gathers of 1 GiB do over 4 to 64 nodes.
_TESTED_BYTES, _TESTED_BYTES_OF_MANY = 2**28, 2**30
_TESTED_KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Published:
    """A collective over full hosts of eight GPUs, with the name of the GPU and the host."""

    gpu: str
    host: Host
    collective: Collective


def read_collectives(folder: Path) -> list[Published]:
    """Read the published collectives in a directory. Raise DataError if a file is not readable.

    published-collectives.csv.xz holds tables of nccl-tests, without those of untuned libraries and without plotted
    curves, which mix healthy and degraded networks. healthy-nccl-tests.csv.xz holds the bandwidths of healthy nodes.
    """
    found = []
    for line in read_table(folder / "published-collectives.csv.xz"):
        host = _host(line["gpu"], float(line["inter_node_gbps_per_node"] or 3200))
        nodes, kind = int(line["nodes"]), cast(Kind, line["collective"])
        one = Collective(kind, nodes, int(line["gpus"]) // nodes, float(line["bytes"]), float(line["time_us"]) / 1e6)
        found.append(Published(line["gpu"][:4], host, one))
    for line in read_table(folder / "healthy-nccl-tests.csv.xz"):
        for kind in _TESTED_KINDS:
            rate = float(line[f"{kind}_healthy_gb_per_s"])
            found.append(Published("H100", _host("H100", 3200), tested(kind, int(line["nodes"]), 8, rate)))
    return found


def tested(kind: Kind, nodes: int, ranks_per_node: int, bus_gb_per_s: float) -> Collective:
    """Return the collective that the tests of the cluster's nodes ran, from its bus bandwidth."""
    num_bytes = _TESTED_BYTES if nodes <= 2 else _TESTED_BYTES_OF_MANY
    at_one = Collective(kind, nodes, ranks_per_node, num_bytes, 1.0)
    return replace(at_one, seconds=at_one.bus_gb_per_s / bus_gb_per_s)


def _host(gpu: str, gbits: float) -> Host:
    return Host("node", gpu, "pcie", "efa", gbits, 450.0 if "H100" in gpu else 300.0)
