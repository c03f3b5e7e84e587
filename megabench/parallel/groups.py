"""The process groups of a layout, as rank lists. Loads no torch."""

from megabench.parallel.layout import Layout

AXES = ("tp", "cp", "pp", "dp")


def rank_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """Every group of each axis, e.g. {"tp": [[0, 1], [2, 3]], …}: the ranks that differ in that coordinate alone."""
    groups: dict[str, list[list[int]]] = {}
    for axis in AXES:
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(layout.world_size):
            at = layout.coordinates(rank)
            others = tuple(getattr(at, other) for other in AXES if other != axis)
            members.setdefault(others, []).append(rank)
        groups[axis] = list(members.values())
    return groups
