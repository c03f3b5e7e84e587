"""The positions of a layout's groups on a topology. Loads no torch."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from megabench.cost.network import Span, span
from megabench.hardware.topology import Topology
from megabench.parallel.layout import Layout
from megabench.parallel.placement import Policy, place


@dataclass(frozen=True)
class Geometry:
    """The spans of a layout's groups, computed on first use. `topology` is indexed by the ranks of the run."""

    topology: Topology
    layout: Layout

    @classmethod
    def of(cls, topology: Topology, layout: Layout, policy: Policy) -> "Geometry":
        return cls(place(topology, layout, policy).topology, layout)

    def _rank(self, pp: int, dp: int, cp: int, tp: int) -> int:
        layout = self.layout
        return ((pp * layout.data_parallel + dp) * layout.cp + cp) * layout.tp + tp

    @cached_property
    def tp(self) -> Span:
        size = self.layout.tp
        return span(self.topology, (range(at, at + size) for at in range(0, self.layout.world_size, size)))

    @cached_property
    def cp(self) -> Span:
        step, block = self.layout.tp, self.layout.tp * self.layout.cp
        starts = (at + tp for at in range(0, self.layout.world_size, block) for tp in range(step))
        return span(self.topology, (range(start, start + block, step) for start in starts))

    @cached_property
    def replicas(self) -> Span:
        """The groups of ranks with the same weights (dp and cp), over which gradients are summed."""
        return span(self.topology, self._replica_groups())

    def parted_replicas(self, size: int) -> tuple[Span, Span]:
        """Divide each group of replicas into parts of `size` neighbouring ranks.

        Return the span of these parts, and the span of groups with one rank from each part.
        """
        groups = self._replica_groups()
        inside = [group[at : at + size] for group in groups for at in range(0, len(group), size)]
        across = [group[at::size] for group in groups for at in range(size)]
        return span(self.topology, inside), span(self.topology, across)

    def _replica_groups(self) -> list[range]:
        layout = self.layout
        block = layout.world_size // layout.pp
        starts = (at + tp for at in range(0, layout.world_size, block) for tp in range(layout.tp))
        return [range(start, start + block, layout.tp) for start in starts]

    @cached_property
    def pp(self) -> Span:
        """The worst boundary between pipeline stages, including the last and the first with interleaved chunks."""
        layout = self.layout
        block = layout.world_size // layout.pp
        boundaries = layout.pp if layout.vp > 1 else layout.pp - 1
        spans = []
        for stage in range(boundaries):
            start, after = stage * block, (stage + 1) % layout.pp * block
            spans.append(span(self.topology, ((start + rank, after + rank) for rank in range(block))))
        if not spans:
            return span(self.topology, ((0,),))
        return max(spans, key=lambda found: (found.across is not None, found.sharing))

    @cached_property
    def ends(self) -> Span:
        """Pairs of ranks of the first and the last stage, which both have the tied embeddings."""
        block = self.layout.world_size // self.layout.pp
        last = self.layout.world_size - block
        return span(self.topology, ((rank, last + rank) for rank in range(block)))

    @cached_property
    def ranks_per_host(self) -> int:
        return max(Counter(self.topology.host_of).values())

    @cached_property
    def world(self) -> Span:
        return span(self.topology, (range(self.layout.world_size),))

    def neighbours(self, size: int) -> Span:
        """Return groups of `size` neighbouring ranks."""
        return span(self.topology, (range(at, at + size) for at in range(0, self.layout.world_size, size)))

    def apart(self, size: int) -> Span:
        """Return groups with one rank from each group of `size` neighbours."""
        world = self.layout.world_size
        return span(self.topology, (range(start, world, size) for start in range(size)))
