"""Layout: the tp, cp, pp, vp and dp sizes of a run, their rules, and the groups of ranks. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import isqrt, lcm, prod

from megabench.errors import UserError
from megabench.models.shape import ModelShape
from megabench.parallel.axes import AXES, AXIS_BY_NAME, FACTORS, RANK_ORDERS

# the first chunk may hold only the embedding, and the last one only the output layer, as in megatron-core
_CHUNKS_WITHOUT_LAYERS = 2


class LayoutError(UserError):
    """Raised for parallel sizes that are invalid together. The message names the sizes and valid alternatives."""


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Return the divisors of `number` up to `limit` in ascending order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    large = [number // d for d in reversed(small) if d * d != number]
    return [d for d in small + large if d <= (limit or number)]


def _choices(values: list[int]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of a rank in the (pp, dp, cp, tp) grid."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Parallel sizes: tensor, context, pipeline, virtual pipeline (model chunks per stage), data.

    Rank numbers increase fastest along tp, then cp, dp and pp. `dp` is None until `with_world_size` fills it.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int | None = None

    def __str__(self) -> str:
        sizes = {field.name: getattr(self, field.name) or 1 for field in fields(self)}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return "·".join(parts) or "dp1"

    def size(self, axis: str) -> int:
        """Return the size of an axis by its name."""
        size = getattr(self, axis)
        assert size is not None, "with_world_size() comes first"
        return int(size)

    def stride(self, axis: str) -> int:
        """Return the difference between the rank numbers of two neighbours on an axis."""
        order = RANK_ORDERS[AXIS_BY_NAME[axis].grid]
        return prod(self.size(faster) for faster in order[: order.index(axis)] if faster in AXIS_BY_NAME)

    @property
    def world_size(self) -> int:
        return prod(map(self.size, FACTORS))

    @property
    def data_parallel(self) -> int:
        assert self.dp is not None, "with_world_size() comes first"
        return self.dp

    def with_world_size(self, world_size: int) -> "Layout":
        """Return the layout with dp such that tp·cp·pp·dp == world_size. Raises LayoutError if that is impossible."""
        self._check_chunks()
        model_ranks = self.tp * self.cp * self.pp
        if world_size % model_ranks:
            fits = [tp for tp in divisors(world_size, self.tp) if world_size % (tp * self.cp * self.pp) == 0]
            way_out = (
                f"with cp={self.cp} and pp={self.pp}, tp in {_choices(fits)} fits"
                if fits
                else f"start a multiple of {model_ranks} processes or lower cp and pp"
            )
            raise LayoutError(
                f"tp={self.tp} × cp={self.cp} × pp={self.pp} needs a multiple of {model_ranks} processes, "
                f"but the world size is {world_size}; {way_out}"
            )
        return replace(self, dp=world_size // model_ranks)

    def check_model(self, shape: ModelShape, seq_length: int) -> None:
        """Raise LayoutError unless this layout divides the layers, heads and sequence of `shape`."""
        fits_tp = [t for t in divisors(shape.num_kv_heads) if shape.num_heads % t == 0 and shape.ffn_size % t == 0]
        for what in ("num_kv_heads", "num_heads", "ffn_size"):
            if (number := getattr(shape, what)) % self.tp:
                raise LayoutError(
                    f"tp={self.tp} does not divide {what}={number} of {shape.name}; use tp in {_choices(fits_tp)}"
                )
        self._check_chunks()
        most = shape.num_layers + (_CHUNKS_WITHOUT_LAYERS if self.vp > 1 else 0)
        if most < self.pp * self.vp:
            raise LayoutError(
                f"{shape.name} has {shape.num_layers} layers, fewer than pp·vp = {self.pp}·{self.vp} = "
                f"{self.pp * self.vp} model chunks; use pp·vp ≤ {most}"
            )
        # sequence parallelism divides the sequence by tp, context parallelism into 2·cp zigzag chunks
        if seq_length % self.sequence_multiple:
            rounded = -(-seq_length // self.sequence_multiple) * self.sequence_multiple
            cuts = [f"tp·cp = {self.tp}·{self.cp}"] * (self.tp > 1) + [f"2·cp = {2 * self.cp}"] * (self.cp > 1)
            raise LayoutError(
                f"seq_length={seq_length} is not divisible by {' and '.join(cuts)}; "
                f"use a multiple of {self.sequence_multiple}, e.g. {rounded}"
            )

    def _check_chunks(self) -> None:
        if self.vp > 1 and self.pp == 1:
            raise LayoutError(f"vp={self.vp} interleaves pipeline stages and needs pp > 1, but pp=1; use vp=1 or pp=2")

    def check_batch(self, global_batch: int, micro_batch: int) -> None:
        """Raise LayoutError unless the global batch is a whole number of micro-batches for every replica and chunk."""
        replicas = micro_batch * self.data_parallel
        if global_batch % replicas:
            fitting = max(1, global_batch // replicas) * replicas
            raise LayoutError(
                f"global_batch={global_batch} is not divisible by micro_batch·dp = {micro_batch}·{self.dp} = "
                f"{replicas}; use e.g. --global-batch {fitting} or a smaller --micro-batch"
            )
        num_micro_batches = global_batch // replicas
        if self.vp > 1 and num_micro_batches % self.pp:
            fitting = max(1, num_micro_batches // self.pp) * self.pp * replicas
            raise LayoutError(
                f"the interleaved schedule (vp={self.vp}) needs the {num_micro_batches} micro-batches of a step to be "
                f"a multiple of pp={self.pp}; use e.g. --global-batch {fitting} or vp=1"
            )

    def micro_batches(self, global_batch: int) -> list[int]:
        """Return all micro-batches that `check_batch` accepts, in ascending order."""
        sequences = self.data_parallel * (self.pp if self.vp > 1 else 1)
        return [] if global_batch % sequences else divisors(global_batch // sequences)

    @property
    def sequence_multiple(self) -> int:
        """The sequence length must be a multiple of this number."""
        return lcm(self.tp * self.cp if self.tp > 1 else 1, 2 * self.cp if self.cp > 1 else 1)

    def chunk_layers(self, num_layers: int, output_cost: float = 0.0) -> list[list[range]]:
        """Return the layer numbers of every model chunk, as [stage][chunk], for the shortest step.

        The last chunk also holds the output layer, which takes as long as `output_cost` layers. With interleaving,
        chunk c of stage p is slice c·pp + p of the model. All stages compute chunk c of a micro-batch at about the same
        time, so the slowest stage delays the others. Earlier chunks get the remaining layers.

        With more chunks than layers, the last chunk holds only the output layer, and then the first one only the
        embedding. A chunk between them without layers would only pass on its input.
        """
        num_chunks = self.pp * self.vp
        sizes = [1] * num_chunks
        if num_chunks > num_layers:
            sizes[-1] = 0
        if num_chunks > num_layers + 1:
            sizes[0] = 0
        costs = [float(size) for size in sizes]
        costs[-1] += output_cost
        slowest = [max(costs[chunk * self.pp : (chunk + 1) * self.pp]) for chunk in range(self.vp)]
        stages = [sum(costs[stage :: self.pp]) for stage in range(self.pp)]

        def burden(number: int) -> tuple[float, ...]:
            """Return the cost of one more layer: the delay of the chunk's round, and then the load of its stage."""
            longest = slowest[number // self.pp]
            return longest if costs[number] + 1 > longest else 0.0, stages[number % self.pp], costs[number]

        for _ in range(num_layers - num_chunks):
            number = min(range(num_chunks), key=burden)
            sizes[number] += 1
            costs[number] += 1
            stages[number % self.pp] += 1
            slowest[number // self.pp] = max(slowest[number // self.pp], costs[number])
        starts = [sum(sizes[:number]) for number in range(num_chunks)]
        slices = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return [[slices[chunk * self.pp + stage] for chunk in range(self.vp)] for stage in range(self.pp)]

    def coordinates(self, rank: int) -> Coordinates:
        """Return the grid position of `rank`."""
        return Coordinates(**{axis: rank // self.stride(axis) % self.size(axis) for axis in FACTORS})


_SIZES = tuple(field.name for field in fields(Layout))
# vp divides the layers of a stage, and no ranks
assert {*_SIZES} == {*AXIS_BY_NAME, "vp"}, "every axis has a size in Layout"
# the sizes that users give; dp follows from the world size
GIVEN_SIZES = tuple(name for name in _SIZES if name != "dp")


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
