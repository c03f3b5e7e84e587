"""Lists the parallel axes.

The kinds of process groups, the coordinates of ranks and the labels in tables derive from this list. Loads no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One axis of a layout, and the field of `Layout` that holds its size.

    The sizes of most axes multiply to the world size. An axis may instead `regroup` the ranks of another axis: expert
    parallelism of size 2 groups neighbouring data-parallel ranks in pairs.

    `title` is the axis's name in reports, `traffic` describes what its groups send, and `member` labels a rank's
    coordinate in drawings ("stage 1").
    """

    name: str
    title: str
    traffic: str
    member: str
    regroups: str | None = None


# the order of axes in tables and records
AXES: tuple[Axis, ...] = (
    Axis("tp", "tensor parallel", "tensor-parallel communication", "tp"),
    Axis("cp", "context parallel", "context-parallel communication", "part"),
    Axis("pp", "pipeline", "sending between stages", "stage"),
    Axis("dp", "data parallel", "data-parallel communication", "data"),
)
AXIS_BY_NAME = {axis.name: axis for axis in AXES}
FACTORS = tuple(axis.name for axis in AXES if axis.regroups is None)
# neighboring ranks differ along the first axis
RANK_ORDER = ("tp", "cp", "dp", "pp")
assert sorted(RANK_ORDER) == sorted(FACTORS)
