"""Published collectives, which determine the constants of links. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megabench.cost import network
from megabench.cost.profile import Profile
from megabench.hardware.topology import Host, Topology, build
from tools.planner_validation.published import read_table

_PLOTTED_BYTES = 256e6  # of the rows without bytes: "size=256MB" in the figure's title
# ratio of bus bandwidth to algorithm bandwidth, as a multiple of (n − 1)/n
_BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass(frozen=True)
class Collective:
    """One measured collective over whole hosts of eight GPUs."""

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
    """The measurements of a file, those of untuned libraries left out; DataError where it cannot be read."""
    found = []
    for line in read_table(path, "it lies beside the published runs"):
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
