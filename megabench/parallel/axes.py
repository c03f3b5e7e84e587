"""Lists the parallel axes.

The kinds of process groups, the coordinates of ranks and the labels in tables derive from this list. Loads no torch.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Axis:
    """One axis of a layout, and the field of `Layout` that holds its size.

    The ranks of a pipeline stage form two grids: one of the axes for dense layers, and one of the axes for experts. The
    sizes of the dense axes multiply to the world size.

    `title` is the axis's name in reports, `traffic` describes what its groups send, and `member` labels a rank's
    coordinate in drawings ("stage 1").
    """

    name: str
    title: str
    traffic: str
    member: str
    grid: Literal["dense", "experts"] = "dense"


# the order of axes in tables and records
AXES: tuple[Axis, ...] = (
    Axis("tp", "tensor parallel", "tensor-parallel communication", "tp"),
    Axis("cp", "context parallel", "context-parallel communication", "part"),
    Axis("pp", "pipeline", "sending between stages", "stage"),
    Axis("dp", "data parallel", "data-parallel communication", "data"),
)
AXIS_BY_NAME = {axis.name: axis for axis in AXES}
FACTORS = tuple(axis.name for axis in AXES if axis.grid == "dense")
# Neighboring ranks differ along the first axis of a grid. No axis of experts exists yet.
RANK_ORDERS = {"dense": ("tp", "cp", "dp", "pp"), "experts": ("etp", "ep", "edp")}
assert sorted(RANK_ORDERS["dense"]) == sorted(FACTORS)
assert all(axis.name in RANK_ORDERS[axis.grid] for axis in AXES), "every axis has a place in the order of its grid"
