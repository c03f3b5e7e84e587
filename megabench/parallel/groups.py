"""The process groups of a placement: who is in them, and over which link. Loads no torch."""

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import Literal

from megabench.hardware.topology import Topology
from megabench.parallel.layout import Layout
from megabench.record import Group

Axis = Literal["tp", "cp", "pp", "dp"]
AXES: tuple[Axis, ...] = ("tp", "cp", "pp", "dp")


def rank_groups(layout: Layout) -> dict[Axis, list[list[int]]]:
    """Every group of each axis, e.g. {"tp": [[0, 1], [2, 3]], …}: the ranks that differ in that coordinate alone."""
    groups: dict[Axis, list[list[int]]] = {}
    strides = {"tp": 1, "cp": layout.tp, "dp": layout.tp * layout.cp, "pp": layout.world_size // layout.pp}
    for axis in AXES:
        size, stride = getattr(layout, axis), strides[axis]
        firsts = (rank for rank in range(layout.world_size) if rank // stride % size == 0)
        groups[axis] = [list(range(first, first + size * stride, stride)) for first in firsts]
    return groups


def differing_axes(layout: Layout, ranks: Sequence[int]) -> str:
    """The axes along which the ranks of a group differ: "tp", "cp·dp"; "none" for a single rank."""
    places = [layout.coordinates(rank) for rank in ranks]
    return "·".join(axis for axis in AXES if len({getattr(place, axis) for place in places}) > 1) or "none"


def groups_on(layout: Layout, topology: Topology) -> list[Group]:
    """Every group of more than one rank, with its slowest link. `topology` goes by the run's ranks."""
    return [
        Group(kind=axis, ranks=ranks, link=topology.slowest_link(neighbours(axis, ranks)))
        for axis, groups in rank_groups(layout).items()
        for ranks in groups
        if len(ranks) > 1
    ]


def neighbours(axis: Axis, ranks: Sequence[int]) -> Iterable[tuple[int, int]]:
    """The pairs of a group that talk to each other: any two, but of a pipeline one stage and the next."""
    return pairwise(ranks) if axis == "pp" else combinations(ranks, 2)
