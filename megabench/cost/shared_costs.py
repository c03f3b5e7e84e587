"""Costs that all engines share: layers, groups and the host, computed once for all candidates of a job."""

from functools import cache, lru_cache, partial

from megabench.cost import compute, network, schedule
from megabench.cost.compute import GpuModel, LayerSeconds
from megabench.cost.geometry import Geometry
from megabench.cost.job import Candidate, Job
from megabench.cost.network import Span
from megabench.cost.profile import Profile
from megabench.hardware.topology import Topology
from megabench.parallel.layout import Layout
from megabench.parallel.placement import Policy
from megabench.precision import POLICIES

# Host time of a collective with the Python code around it, as a multiple of the host time of the bare collective call
# (benchmarks/host-time)
_LAUNCHES_PER_COLLECTIVE = 4

Sizes = tuple[int, int, int, bool, Policy]


@lru_cache(maxsize=4096)
def _geometry(topology: Topology, tp: int, cp: int, pp: int, interleaved: bool, policy: Policy) -> Geometry:
    """Return the geometry of a layout, which does not depend on the job or the profile."""
    layout = Layout(tp=tp, cp=cp, pp=pp, vp=2 if interleaved else 1).with_world_size(topology.world_size)
    return Geometry.of(topology, layout, policy)


class Base:
    """A job on a topology, with the costs that its candidates share."""

    def __init__(self, job: Job, topology: Topology, profile: Profile) -> None:
        self.job, self.topology, self.profile = job, topology, profile
        device, policy = topology.hosts[0].device, POLICIES[job.precision]
        self.peak = profile.peak(device, job.precision)
        fp8_peak = self.peak if policy.has_fp8_products else None
        self.machine = GpuModel(profile, profile.peak(device, policy.compute), fp8_peak)
        self.geometry = cache(partial(_geometry, topology))
        self.layer = cache(partial(compute.layer_seconds, self.machine, job))
        self.output = cache(partial(compute.output_seconds, self.machine, job))
        self.embedding = cache(partial(compute.embedding_seconds, self.machine, job))

    def geometry_of(self, candidate: Candidate) -> Geometry:
        return self.geometry(*self.sizes(candidate))

    @staticmethod
    def sizes(candidate: Candidate) -> Sizes:
        """Return the sizes that determine the groups of a candidate."""
        layout = candidate.layout
        return layout.tp, layout.cp, layout.pp, layout.vp > 1, candidate.placement

    def host(self, candidate: Candidate, layer: LayerSeconds, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds that the host needs to launch a layer's kernels and collectives, forward and backward.

        `forward` and `backward` are numbers of collectives.
        """
        each = _LAUNCHES_PER_COLLECTIVE * self.profile.collective_launch_seconds
        in_forward, in_backward = layer.host_forward + forward * each, layer.host_backward + backward * each
        return in_forward, in_backward + (in_forward if candidate.recompute == "full" else 0.0)

    def interference(self, where: Span, communicate: float, num_bytes: float) -> float:
        """Return the slowdown of compute per second of overlapped communication, in which each rank gets `num_bytes`.

        Inside a host, the slowdown is that of the profile. Communication takes memory bandwidth and processors from
        compute, so the same bytes between hosts cost compute no more than over NVLink, although they take longer.
        """
        if where.across is None or communicate == 0:
            return self.profile.interference
        rate = network.inner_bandwidth(where.host, "nvlink", self.profile.links["nvlink"])
        return self.profile.interference * min(1.0, num_bytes / rate / communicate)

    def tail(
        self, work: float, communicate: float, num_bytes: float, pieces: int, where: Span, overlaps: bool
    ) -> float:
        """Return the exposed seconds of a communication, plus the slowdown of the work that overlaps it."""
        if not overlaps:
            return communicate
        tail = schedule.hidden_tail(work, communicate, pieces)
        return tail + self.interference(where, communicate, num_bytes) * (communicate - tail)
