"""Published collective timings for the fit of the link constants. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megabench.cost import network
from megabench.cost.profile import Profile
from megabench.hardware.topology import Host, Topology, build
from tools.planner_validation.published import read_table

# message size in bytes for rows without a size; the title of the published plot says "size=256MB"
_PLOTTED_BYTES = 256e6
_BUS = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
}  # bus bandwidth ÷ algorithm bandwidth, without the factor (n − 1)/n


@dataclass(frozen=True)
class Collective:
    """One measured collective over one or more full hosts of eight GPUs."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    gpu: str
    topology: Topology
    num_bytes: float
    seconds: float

    def predicted(self, profile: Profile) -> float:
        where = network.span(self.topology, [range(self.topology.world_size)])
        if self.kind == "all_reduce":
            return network.all_reduce_seconds(profile, where, self.num_bytes)
        return network.gather_seconds(profile, where, self.num_bytes)


def read_collectives(path: Path) -> list[Collective]:
    """Read the measurements of a CSV file, except those of untuned libraries. Raise DataError if the read fails."""
    found = []
    for line in read_table(path, "Place the file in the directory of the published runs."):
        if "untuned" in line["note"]:
            continue
        gpus, nodes = int(line["gpus"]), int(line["nodes"])
        nvlink = 450.0 if "H100" in line["gpu"] else 300.0
        gbits = float(line["inter_node_gbps_per_node"] or 3200)
        host = Host("node", line["gpu"], "pcie", "efa", gbits, nvlink)
        num_bytes = float(line["bytes"] or _PLOTTED_BYTES)
        bus = _BUS[line["collective"]] * (gpus - 1) / gpus
        plotted = float(line["busbw_gbs"] or 0)
        seconds = float(line["time_us"]) / 1e6 if line["time_us"] else num_bytes * bus / (plotted * 1e9)
        kind: Literal["all_reduce", "all_gather", "reduce_scatter"] = line["collective"]  # type: ignore[assignment]
        hosts = build([(host, gpus // nodes, gpus // nodes)] * nodes)
        found.append(Collective(kind, line["gpu"][:4], hosts, num_bytes, seconds))
    return found
