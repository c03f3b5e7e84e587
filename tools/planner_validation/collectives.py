"""Published collective timings for the fit of the link constants. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megabench.cost.fabric import Collective, Kind
from megabench.hardware.topology import Host
from tools.planner_validation.published import read_table

# Message size of the tests of one cluster's nodes. Its operators publish the bandwidths without the size, and a plot of
# the same tests is titled "size=256MB". With this size, all-gathers over 4 to 64 nodes agree with a ring within 15%.
_TESTED_BYTES = 256e6
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
    at_one = Collective(kind, nodes, ranks_per_node, _TESTED_BYTES, 1.0)
    return Collective(kind, nodes, ranks_per_node, _TESTED_BYTES, at_one.bus_gb_per_s / bus_gb_per_s)


def _host(gpu: str, gbits: float) -> Host:
    return Host("node", gpu, "pcie", "efa", gbits, 450.0 if "H100" in gpu else 300.0)
