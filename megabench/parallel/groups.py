"""The process groups of a placement: who is in them, over which link, and how they are made.

Loads torch only to make them.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Literal

from megabench.hardware.topology import Topology
from megabench.parallel.layout import Layout
from megabench.record import Group

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.distributed import ProcessGroup

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


def create(layout: Layout) -> "ProcessGroupCollection":
    """megatron-core's process groups of a layout, on the default process group, whose ranks are placed already.

    They live in its global state, which some of its layers and schedules read: a second call finds the same groups.
    """
    from megabench.runtime.megatron_core import prepare

    prepare()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
            context_parallel_size=layout.cp,
            create_gloo_process_groups=False,
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    sizes = (groups.tp.size(), groups.cp.size(), groups.pp.size(), groups.dp.size())
    assert sizes == (layout.tp, layout.cp, layout.pp, layout.dp), "one process, one layout"
    return groups


def create_mine(groups: Sequence[Sequence[int]]) -> "ProcessGroup | None":
    """This rank's group of several that all ranks make at once; None where it is in none."""
    import torch.distributed as dist

    made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)
