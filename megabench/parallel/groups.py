"""The process groups of a placement: their ranks and their links. Loads no torch."""

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

from megabench.hardware.topology import Topology
from megabench.parallel.axes import AXES, FACTORS
from megabench.parallel.layout import Layout
from megabench.record import Group


def rank_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """Return the groups of each axis, e.g. {"tp": [[0, 1], [2, 3]], …}.

    The ranks of a group differ only in the coordinate of the axis, among the axes of its grid.
    """
    groups: dict[str, list[list[int]]] = {}
    for axis in AXES:
        stride, size = layout.stride(axis.name), layout.size(axis.name)
        firsts = [rank for rank in range(layout.world_size) if rank // stride % size == 0]
        groups[axis.name] = [list(range(first, first + size * stride, stride)) for first in firsts]
    return groups


def differing_axes(layout: Layout, ranks: Sequence[int]) -> str:
    """The axes along which the ranks of a group differ: "tp", "cp·dp"; "none" for a single rank."""
    places = [layout.coordinates(rank) for rank in ranks]
    return "·".join(axis for axis in FACTORS if len({getattr(place, axis) for place in places}) > 1) or "none"


def groups_on(layout: Layout, topology: Topology) -> list[Group]:
    """Return every group of more than one rank, with its slowest link.

    `topology` is indexed by the ranks of the run.
    """
    return [
        Group(kind=axis, ranks=ranks, link=topology.slowest_link(neighbours(axis, ranks)))
        for axis, groups in rank_groups(layout).items()
        for ranks in groups
        if len(ranks) > 1
    ]


def neighbours(axis: str, ranks: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return the pairs of ranks that communicate: adjacent stages of a pipeline, all pairs of other groups."""
    return pairwise(ranks) if axis == "pp" else combinations(ranks, 2)
