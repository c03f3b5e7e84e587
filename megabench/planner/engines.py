"""What a step costs under each engine: compute, communication and the schedule, put together. Loads no torch."""

from dataclasses import dataclass
from functools import cache, lru_cache, partial

from megabench.hardware.topology import Topology
from megabench.parallel.layout import Layout
from megabench.parallel.placement import Policy
from megabench.planner import compute, network, schedule
from megabench.planner.compute import LayerSeconds, Machine
from megabench.planner.geometry import Geometry
from megabench.planner.job import Candidate, Job
from megabench.planner.memory import Memory, host_bytes, memory_of, stage_layers, stage_parameters
from megabench.planner.profile import Profile

_DDP_BUCKET = 25e6 / 4  # parameters that torch's DDP reduces at once: 25 MB of fp32 gradients
_ZERO_BUCKET = 5e8  # that DeepSpeed does (its reduce_bucket_size and allgather_bucket_size)
_HOOKS = 40  # kernels and hooks of a layer that gathers and frees its weights, forward
_ADAM_HOST_BYTES = 28  # that AdamW on the host reads and writes a parameter, in fp32


@dataclass(frozen=True)
class Estimate:
    """A prediction. `parts` are seconds and add up to the step; `exposed` of them communication, by group.

    `parts`: compute, recompute, launch (waiting for the host), tp, cp, pp, dp, bubble, optimizer (and what else comes
    once a step), offload.
    `missing_bytes` is what a GPU lacks, its headroom included; negative for what is left.
    """

    candidate: Candidate
    step_seconds: float
    parts: dict[str, float]
    memory: Memory
    missing_bytes: float
    host_bytes: float
    tokens_per_second_per_device: float
    mfu: float

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0

    @property
    def exposed(self) -> dict[str, float]:
        return {axis: self.parts[axis] for axis in ("tp", "cp", "pp", "dp") if self.parts.get(axis)}


@dataclass(frozen=True)
class _Chunk:
    """Seconds of one model chunk and micro-batch, by part, and the timeline's view of them."""

    stage: schedule.Stage
    compute: float
    recompute: float
    launch: float
    tp: float
    cp: float


@lru_cache(maxsize=4096)
def _geometry(topology: Topology, tp: int, cp: int, pp: int, interleaved: bool, policy: Policy) -> Geometry:
    """The geometry of a layout, for whatever job and profile."""
    layout = Layout(tp=tp, cp=cp, pp=pp, vp=2 if interleaved else 1).with_world_size(topology.world_size)
    return Geometry.of(topology, layout, policy)


class Costs:
    """Predicts candidates for one job on one topology; what candidates share is computed once."""

    def __init__(self, job: Job, topology: Topology, profile: Profile) -> None:
        self.job, self.topology, self.profile = job, topology, profile
        device = topology.hosts[0].device
        self.machine = Machine(profile, profile.peak(device, job.precision))
        self.usable_bytes = profile.usable_bytes(device)
        self._geometry = cache(partial(_geometry, topology))
        self._layer = cache(lambda tp, cp, size: compute.layer_seconds(self.machine, job, tp, cp, size))
        self._output = cache(lambda tp, cp, size: compute.output_seconds(self.machine, job, tp, cp, size))
        self._embedding = cache(lambda tp, cp, size: compute.embedding_seconds(self.machine, job, tp, cp, size))
        self._communication = cache(self._layer_communication)

    def memory(self, candidate: Candidate) -> Memory:
        return memory_of(self.job, candidate, self.profile)

    def missing_bytes(self, candidate: Candidate) -> float:
        """What the fullest GPU lacks, its headroom included; negative for what is left."""
        return self.memory(candidate).total - self.usable_bytes

    def shortest(self, candidate: Candidate) -> float:
        """Seconds that a step will take at least: of a pipeline without its timeline and tail."""
        if candidate.engine != "megatron":
            return sum(self._data_parallel_parts(candidate).values())
        stages = [chunk.stage for chunk in self._chunks(candidate)]
        micro_batches = candidate.num_micro_batches(self.job)
        blocking = self._is_blocking(candidate)
        return schedule.shortest(stages, candidate.layout.vp, micro_batches, self._send(candidate), blocking)

    def estimate(self, candidate: Candidate) -> Estimate:
        """The whole prediction."""
        is_pipeline = candidate.engine == "megatron"
        parts = self._pipeline_parts(candidate) if is_pipeline else self._data_parallel_parts(candidate)
        step = sum(parts.values())
        memory = self.memory(candidate)
        per_device = self.job.tokens / step / candidate.layout.world_size
        return Estimate(
            candidate=candidate,
            step_seconds=step,
            parts=parts,
            memory=memory,
            missing_bytes=memory.total - self.usable_bytes,
            host_bytes=host_bytes(self.job, candidate, self._geometry_of(candidate).ranks_per_host),
            tokens_per_second_per_device=per_device,
            mfu=per_device * self.job.flops_per_token / self.machine.peak,
        )

    def _geometry_of(self, candidate: Candidate) -> Geometry:
        return self._geometry(*self._sizes(candidate))

    @staticmethod
    def _sizes(candidate: Candidate) -> tuple[int, int, int, bool, Policy]:
        """What the groups of a candidate depend on."""
        layout = candidate.layout
        return layout.tp, layout.cp, layout.pp, layout.vp > 1, candidate.placement

    # tensor, context and pipeline parallelism

    def _layer_communication(
        self, sizes: tuple[int, int, int, bool, Policy], micro_batch: int
    ) -> tuple[float, float, float, float, float]:
        """Exposed seconds of a layer: tp forward, tp backward, cp forward, cp backward; and collectives forward.

        With sequence parallelism a layer gathers 2·B·S·H/C bytes twice and reduce-scatters them twice, forward;
        backward gathers twice, gathers the inputs again beside the input gradients and scatters beside the weight's
        (arXiv 2205.05198, figure 5; megatron-core's layers). Without it, two all-reduces each way, of which those of
        backward run beside the weight gradients. Context parallelism gathers keys and values, 4·B·S·K·D/T bytes.
        """
        job, geometry, (tp, cp_size, *_) = self.job, self._geometry(*sizes), sizes
        layer = self._layer(tp, cp_size, micro_batch)
        values = micro_batch * job.seq_length * job.bytes_of_value
        sequence = values / cp_size * job.shape.hidden_size
        tp_forward = tp_backward = cp = 0.0
        if tp > 1:
            gather = network.gather_seconds(self.profile, geometry.tp, sequence)
            if job.stack.sequence_parallel:
                tp_forward = 4 * gather
                waits = 2 * gather
                hidden = [(2 * gather, layer.input_gradients), (2 * gather, layer.weight_gradients)]
            else:
                tp_forward = 2 * network.all_reduce_seconds(self.profile, geometry.tp, sequence)
                waits, hidden = 0.0, [(tp_forward, layer.weight_gradients)]
            if job.stack.overlaps_tp_backward:
                for communicate, work in hidden:
                    waits += max(0.0, communicate - work) + self.profile.interference * min(communicate, work)
                tp_backward = waits
            else:
                tp_backward = waits + sum(communicate for communicate, _ in hidden)
        if cp_size > 1:
            keys = 2 * values * job.shape.num_kv_heads * job.shape.head_dim / tp
            cp = network.gather_seconds(self.profile, geometry.cp, keys)
        collectives = (tp > 1) * 4 + (cp_size > 1)
        return tp_forward, tp_backward, cp, cp, collectives

    def _chunks(self, candidate: Candidate) -> list[_Chunk]:
        """The mean model chunk of every stage."""
        layout = candidate.layout
        divides = self.job.shape.num_layers % (layout.pp * layout.vp) == 0
        if divides and not self.job.stack.balances_stages:  # the stages between the ends are alike
            middle = [self._chunk(candidate, 1)] * (layout.pp - 2) if layout.pp > 2 else []
            ends = [self._chunk(candidate, 0)] + ([self._chunk(candidate, layout.pp - 1)] if layout.pp > 1 else [])
            return [ends[0], *middle, *ends[1:]]
        return [self._chunk(candidate, stage) for stage in range(layout.pp)]

    def _chunk(self, candidate: Candidate, stage: int) -> _Chunk:
        layout, size = candidate.layout, candidate.micro_batch
        layer = self._layer(layout.tp, layout.cp, size)
        communication = self._communication(self._sizes(candidate), size)
        tp_forward, tp_backward, cp_forward, cp_backward, collectives = communication
        layers = stage_layers(self.job, candidate, stage) / layout.vp
        forward, backward = layers * layer.forward, layers * layer.backward
        if stage == 0:
            first = self._embedding(layout.tp, layout.cp, size)
            forward, backward = forward + first[0] / layout.vp, backward + first[1] / layout.vp
        if stage == layout.pp - 1:
            last = self._output(layout.tp, layout.cp, size)
            forward, backward = forward + last[0] / layout.vp, backward + last[1] / layout.vp
        again = {"none": 0.0, "selective": layers * layer.attention, "full": layers * layer.forward}
        recompute = again[candidate.recompute]
        tp_again = tp_forward if candidate.recompute == "full" else 0.0
        cp_again = cp_forward if candidate.recompute != "none" else 0.0
        host = self._host(candidate, layer, collectives)
        exposed_forward = layers * (tp_forward + cp_forward)
        exposed_backward = layers * (tp_backward + tp_again + cp_backward + cp_again)
        launch_forward = max(0.0, layers * host[0] - forward - exposed_forward)
        launch_backward = max(0.0, layers * host[1] - backward - recompute - exposed_backward)
        return _Chunk(
            stage=schedule.Stage(
                forward=forward + exposed_forward + launch_forward,
                backward=backward + recompute + exposed_backward + launch_backward,
            ),
            compute=forward + backward,
            recompute=recompute,
            launch=launch_forward + launch_backward,
            tp=layers * (tp_forward + tp_backward + tp_again),
            cp=layers * (cp_forward + cp_backward + cp_again),
        )

    def _host(self, candidate: Candidate, layer: LayerSeconds, collectives: float) -> tuple[float, float]:
        """Seconds that the host needs to start a layer's kernels and collectives, forward and backward."""
        each = self.profile.collective_launch_seconds
        forward = layer.host_forward + collectives * each
        backward = layer.host_backward + 1.5 * collectives * each
        return forward, backward + (forward if candidate.recompute == "full" else 0.0)

    def _is_blocking(self, candidate: Candidate) -> bool:
        return self.job.stack.blocking_p2p and candidate.layout.vp == 1

    def _send(self, candidate: Candidate) -> float:
        """A stage's output to the next: 2·B·S·H/C bytes, cut by tp under sequence parallelism."""
        layout, geometry = candidate.layout, self._geometry_of(candidate)
        if layout.pp == 1:
            return 0.0
        values = candidate.micro_batch * self.job.seq_length / layout.cp * self.job.shape.hidden_size
        cut = layout.tp if self.job.stack.sequence_parallel else 1
        num_bytes = values * self.job.bytes_of_value / cut
        return network.send_seconds(self.profile, geometry.pp, num_bytes, geometry.ranks_per_host)

    def _pipeline_parts(self, candidate: Candidate) -> dict[str, float]:
        job, layout, geometry = self.job, candidate.layout, self._geometry_of(candidate)
        micro_batches = candidate.num_micro_batches(job)
        chunks, send, blocking = self._chunks(candidate), self._send(candidate), self._is_blocking(candidate)
        timeline = schedule.simulate([chunk.stage for chunk in chunks], layout.vp, micro_batches, send, blocking)
        reduces, gathers, updates = [], [], []
        fill = 0.0
        for stage, chunk in enumerate(chunks):
            parameters = stage_parameters(job, candidate, stage)
            pieces = self._num_buckets(candidate, stage, parameters)
            reduce, gather = self._replica_seconds(candidate, geometry, parameters, pieces)
            backward, forward = chunk.stage.backward * layout.vp, chunk.stage.forward * layout.vp
            reduces.append(self._tail(backward, reduce, pieces, job.stack.overlaps_gradients))
            gathers.append(max(0.0, self._tail(forward, gather, pieces, job.stack.overlaps_parameters) - fill))
            fill += chunk.stage.forward + send
            shards = geometry.replicas.size if candidate.zero_stage else 1
            updates.append(compute.optimizer_seconds(self.machine, job, parameters, parameters / shards))
        ends = [end + tail for end, tail in zip(timeline.ends, reduces, strict=True)]
        last = max(range(layout.pp), key=ends.__getitem__)
        chunk, times = chunks[last], micro_batches * layout.vp
        return {
            "compute": times * chunk.compute,
            "recompute": times * chunk.recompute,
            "launch": times * chunk.launch,
            "tp": times * chunk.tp,
            "cp": times * chunk.cp,
            "pp": timeline.sending[last],
            "bubble": max(0.0, timeline.ends[last] - timeline.busy[last] - timeline.sending[last]),
            "dp": reduces[last] + max(gathers),
            "optimizer": max(updates) + self.profile.step_seconds,
        }

    def _num_buckets(self, candidate: Candidate, stage: int, parameters: float) -> int:
        """Collectives in which a stage's gradients are summed: megatron-core cuts the first stage's alone, into 40 M
        parameters or 1 M a replica (distributed_data_parallel.py).
        """
        if not self.job.stack.overlaps_gradients or (stage and not self.job.stack.buckets_on_all_stages):
            return 1
        size = max(self.job.stack.bucket_parameters, 1e6 * candidate.layout.data_parallel * candidate.layout.cp)
        return max(1, round(parameters / size))

    def _replica_seconds(
        self, candidate: Candidate, geometry: Geometry, parameters: float, calls: int
    ) -> tuple[float, float]:
        """Summing the gradients of a rank's parameters over its replicas, and gathering what they updated.

        With a sharded optimizer a reduce-scatter and an all-gather of the weights, else an all-reduce.
        """
        gradients, weights = self.job.bytes_of_gradient * parameters, self.job.bytes_of_value * parameters
        if candidate.zero_stage == 0:
            return network.all_reduce_seconds(self.profile, geometry.replicas, gradients, calls), 0.0
        reduce = network.gather_seconds(self.profile, geometry.replicas, gradients, calls)
        return reduce, network.gather_seconds(self.profile, geometry.replicas, weights, calls)

    def _tail(self, work: float, communicate: float, pieces: int, overlaps: bool) -> float:
        """What is left of a communication behind the work that hides it, and what the hidden part costs that work."""
        if not overlaps:
            return communicate
        tail = schedule.hidden_tail(work, communicate, pieces)
        return tail + self.profile.interference * (communicate - tail)

    # data parallelism alone

    def _data_parallel_parts(self, candidate: Candidate) -> dict[str, float]:
        job, geometry = self.job, self._geometry_of(candidate)
        layers, micro_batches = job.shape.num_layers, candidate.num_micro_batches(job)
        layer = self._layer(1, 1, candidate.micro_batch)
        first, last = self._embedding(1, 1, candidate.micro_batch), self._output(1, 1, candidate.micro_batch)
        again = layer.forward if candidate.recompute == "full" else 0.0
        gather, gather_back, reduce, ends = self._sharded_seconds(candidate, geometry)
        hooks = _HOOKS * self.profile.launch_seconds if gather else 0.0
        host = self._host(candidate, layer, 0.0)
        forward = max(layer.forward, host[0] + hooks)
        backward = max(layer.backward + again, host[1] + 2 * hooks)
        interference = self.profile.interference
        with_communication = (
            schedule.two_streams(forward, gather, layers, interference)
            + schedule.two_streams(backward, gather_back + reduce, layers, interference)
            + ends
        )
        plain = layers * (layer.forward + layer.backward)
        launch = layers * (forward + backward - layer.forward - layer.backward - again)
        exposed = with_communication - layers * (forward + backward)
        once, update = self._once_a_step(candidate, geometry, layers * backward)
        return {
            "compute": micro_batches * (plain + sum(first) + sum(last)),
            "recompute": micro_batches * layers * again,
            "launch": micro_batches * launch,
            "dp": micro_batches * exposed + once,
            "optimizer": update + self.profile.step_seconds,
            "offload": self._offload_seconds(candidate, geometry, micro_batches),
        }

    def _sharded_seconds(self, candidate: Candidate, geometry: Geometry) -> tuple[float, float, float, float]:
        """What a layer communicates in every micro-batch: gathers forward and backward, its gradient's reduction; and
        what no layer hides: the embedding's gather at the start and its gradient at the end.

        ZeRO-3 and FSDP2 gather 2 bytes a parameter twice and reduce-scatter g; ZeRO-2 reduces alone (arXiv 1910.02054,
        section 7). hpZ gathers for backward among neighbours (arXiv 2306.10209); HSDP shards among them and all-reduces
        the shards over the others.
        """
        job, profile = self.job, self.profile
        layer, ends = job.layer_parameters, job.embedding_parameters
        value, g = job.bytes_of_value, job.bytes_of_gradient
        if candidate.engine == "fsdp" or (candidate.zero_stage == 3 and candidate.engine == "deepspeed"):
            shards = candidate.shard_size or candidate.layout.world_size
            where = geometry.neighbours(shards) if candidate.shard_size else geometry.world
            inner = geometry.neighbours(candidate.hpz_size) if candidate.hpz_size else where

            def gather(parameters: float) -> float:
                return network.gather_seconds(profile, where, value * parameters)

            def reduce(parameters: float) -> float:
                seconds = network.gather_seconds(profile, where, g * parameters)
                if candidate.shard_size:
                    across = geometry.apart(candidate.shard_size)
                    seconds += network.all_reduce_seconds(profile, across, g * parameters / shards)
                return seconds

            back = network.gather_seconds(profile, inner, value * layer)
            return gather(layer), back, reduce(layer), gather(ends) + reduce(ends)
        if candidate.engine == "deepspeed" and candidate.zero_stage == 2:
            reduce_layer = network.gather_seconds(profile, geometry.world, g * layer)
            return 0.0, 0.0, reduce_layer, network.gather_seconds(profile, geometry.world, g * ends)
        return 0.0, 0.0, 0.0, 0.0

    def _once_a_step(self, candidate: Candidate, geometry: Geometry, backward: float) -> tuple[float, float]:
        """Communication that comes once a step, exposed, and the optimizer."""
        job, parameters = self.job, self.job.num_parameters
        ranks, once = candidate.layout.world_size, 0.0
        gradients, weights = job.bytes_of_gradient * parameters, job.bytes_of_value * parameters
        sharded = parameters / (candidate.shard_size or ranks)
        if candidate.engine == "ddp" or (candidate.zero_stage == 0 and candidate.engine == "deepspeed"):
            pieces = max(1, round(parameters / (_DDP_BUCKET if candidate.engine == "ddp" else _ZERO_BUCKET)))
            reduce = network.all_reduce_seconds(self.profile, geometry.world, gradients, pieces)
            once = self._tail(backward, reduce, pieces, overlaps=candidate.engine == "ddp")
            sharded = parameters
        elif candidate.engine == "deepspeed" and candidate.zero_stage < 3:
            once = network.gather_seconds(self.profile, geometry.world, weights)
            if candidate.zero_stage == 1:
                pieces = max(1, round(parameters / _ZERO_BUCKET))
                reduce = network.gather_seconds(self.profile, geometry.world, gradients, pieces)
                once += self._tail(backward, reduce, pieces, overlaps=True)
        if candidate.offload != "none":
            return once, 0.0
        return once, compute.optimizer_seconds(self.machine, job, sharded, sharded)

    def _offload_seconds(self, candidate: Candidate, geometry: Geometry, micro_batches: int) -> float:
        """Host copies and the host's AdamW: gradients out every micro-batch, weights in once, 28 bytes a parameter over
        memory that all GPUs of a host share; offloaded weights come in again for every gather (arXiv 2101.06840).
        """
        if candidate.offload == "none":
            return 0.0
        shard = self.job.num_parameters / candidate.layout.world_size
        copy = self.profile.host_copy_gb_per_s * 1e9
        gradients = self.job.bytes_of_gradient * shard * micro_batches / copy
        each = 4 if candidate.engine == "fsdp" else self.job.bytes_of_value  # its shards are fp32
        weights = each * shard / copy * (2 * micro_batches if candidate.offload == "all" else 1)
        host = _ADAM_HOST_BYTES * shard * geometry.ranks_per_host / (self.profile.dram_gb_per_s * 1e9)
        return gradients + weights + host
