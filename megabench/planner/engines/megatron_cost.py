"""Cost model of a step under tensor, context and pipeline parallelism (the megatron engine). Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megabench.cost import compute, network, schedule
from megabench.cost.geometry import Geometry
from megabench.cost.job import Candidate, Product
from megabench.cost.network import Span
from megabench.cost.shared_costs import Base, Sizes
from megabench.planner.engines.megatron_memory import (
    copies_between_products,
    megatron_variant,
    stage_layers,
    stage_parameters,
)

# Seconds by which a copy engine slows products down, per second of a copy beside them. With this value, the predicted
# step of 12 layers of Llama-3-8B with tp=2 takes as long as the measured one ("Copy engines by size" in
# benchmarks/README.md).
_COPY_INTERFERENCE = 0.4

# Seconds in which GPUs of one NVLink domain exchange the largest value of a tensor by one kernel: 768 such kernels take
# 8 ms of a profiled step of 12 layers of Llama-3-8B in fp8 with tp=2 on H200s.
_AMAX_SECONDS = 1e-5


@dataclass(frozen=True)
class _Chunk:
    """The seconds of one model chunk and micro-batch, by part and in total."""

    total: schedule.Chunk
    compute: float
    recompute: float
    launch: float
    tp: float
    cp: float


class Pipeline:
    """Cost model of candidates with tensor, context or pipeline parallelism."""

    reduced_amaxes = 4

    def __init__(self, base: Base) -> None:
        self.base = base
        self.job, self.profile, self.machine = base.job, base.profile, base.machine
        self._communication = cache(self._layer_communication)

    def shortest(self, candidate: Candidate) -> float:
        """Return a lower bound of the step time in seconds, without the simulated timeline and the final reduction."""
        stages = [[chunk.total for chunk in stage] for stage in self._stages(candidate)]
        micro_batches = candidate.num_micro_batches(self.job)
        return schedule.shortest(stages, micro_batches, self._send(candidate), self._is_blocking(candidate))

    def _layer_communication(self, sizes: Sizes, micro_batch: int) -> tuple[float, float, float, float, float]:
        """Return the exposed seconds of a layer: tp forward, tp backward, cp forward, cp backward; and collectives
        forward.

        Context parallelism either exchanges queries, keys, values and the attention output, 4·B·S/C·(N + K)·D/T bytes
        in total, or gathers keys and values, 4·B·S·K·D/T bytes.

        In fp8 layers, the ranks agree on `reduced_amaxes` scalars in each pass: the largest values of tensors that are
        divided over the tp·cp ranks (engines/megatron/fp8_linear.py). With bf16 gradients, only the forward pass does.
        """
        job, geometry, (tp, cp_size, *_) = self.job, self.base.geometry(*sizes), sizes
        fp8_forward, fp8_backward = job.fp8_share("forward"), job.fp8_share("input_gradient")
        tp_forward, tp_backward = self._tp_seconds(sizes, micro_batch) if tp > 1 else (0.0, 0.0)
        values = micro_batch * job.seq_length * job.bytes_of_value
        cp = 0.0
        exchanges = 2 * job.exchanges_heads(tp, cp_size)
        if exchanges:
            heads = 2 * (job.shape.num_heads + job.shape.num_kv_heads) * job.shape.head_dim / tp
            cp = network.exchange_seconds(self.profile, geometry.cp, values / cp_size * heads, exchanges)
        elif cp_size > 1:
            keys = 2 * values * job.shape.num_kv_heads * job.shape.head_dim / tp
            cp = network.gather_seconds(self.profile, geometry.cp, keys)
        # the host needs as long to launch the copy of a part as to launch a collective
        copies = self._copies(sizes, micro_batch)
        messages = tp - 1 if copies else 1
        collectives: float = (tp > 1) * 4 * messages + (exchanges or cp_size > 1)
        cp_forward = cp_backward = cp
        if fp8_forward and tp * cp_size > 1:
            where, amaxes = geometry.neighbours(tp * cp_size), self.reduced_amaxes
            by_nccl = network.all_reduce_seconds(self.profile, where, 4 * amaxes, calls=amaxes)
            agree = amaxes * _AMAX_SECONDS if copies and cp_size == 1 else by_nccl
            if tp > 1:
                tp_forward, tp_backward = tp_forward + fp8_forward * agree, tp_backward + fp8_backward * agree
            else:
                cp_forward, cp_backward = cp + fp8_forward * agree, cp + fp8_backward * agree
            collectives += amaxes * fp8_forward
        return tp_forward, tp_backward, cp_forward, cp_backward, collectives

    def _tp_seconds(self, sizes: Sizes, micro_batch: int) -> tuple[float, float]:
        """Return the exposed seconds of a layer's tensor-parallel communication, forward and backward.

        A layer's forward pass gathers 2·B·S·H/C bytes twice and reduce-scatters them twice. Its backward pass gathers
        the output gradients twice. The backward pass also gathers inputs that forward did not keep, overlapped with the
        input gradients, and reduce-scatters, overlapped with the weight gradients (arXiv 2205.05198, figure 5;
        megatron-core's layers).
        """
        if self._copies(sizes, micro_batch):
            return self._copy_seconds(sizes, micro_batch)
        job, layer, where = self.job, self.base.layer(*sizes[:2], micro_batch), self.base.geometry(*sizes).tp
        sequence = self._sequence_bytes(sizes, micro_batch)
        scatter = network.gather_seconds(self.profile, where, sequence)
        gather = self._gather_seconds(where, sequence, "input_gradient")
        again = 0.0 if job.stack.keeps_gathered else 2 * gather
        backward = 2 * gather + self._overlapped(where, again, 2 * sequence, layer.input_gradients)
        backward += self._overlapped(where, 2 * scatter, 2 * sequence, layer.weight_gradients)
        return 2 * self._gather_seconds(where, sequence, "forward") + 2 * scatter, backward

    def _copies(self, sizes: Sizes, micro_batch: int) -> bool:
        """Return whether copy engines exchange the activations of tensor parallelism, as `tp_overlap=auto` decides."""
        (tp, *_), topology, where = sizes, self.base.topology, self.base.geometry(*sizes).tp
        is_on_one_host = where.across is None and tp <= topology.world_size // len(topology.hosts)
        return (
            is_on_one_host and where.inside == "nvlink" and copies_between_products(self.job, tp, sizes[1], micro_batch)
        )

    def _copy_seconds(self, sizes: Sizes, micro_batch: int) -> tuple[float, float]:
        """Return the same if copy engines exchange the parts of the sequence (engines/megatron/copy_engines.py).

        Half of a layer's products overlap with the gathers of their inputs, and the other half with the reduce-scatters
        of their outputs, part by part. In backward, gathers of inputs and reduce-scatters also overlap with the weight
        gradients. After a reduce-scatter, its T parts are read and added.
        """
        job, layer, where = self.job, self.base.layer(*sizes[:2], micro_batch), self.base.geometry(*sizes).tp
        sequence, others = self._sequence_bytes(sizes, micro_batch), (where.size - 1) / where.size
        rate = network.inner_bandwidth(where.host, "nvlink", self.profile.links["nvlink"])
        scatter = 2 * others * sequence / rate
        gather_forward, gather = (
            scatter * (share / job.bytes_of_value + 1 - share)
            for share in (job.fp8_share("forward"), job.fp8_share("input_gradient"))
        )
        overlapping = others * layer.input_gradients / 2  # forward products take as long

        def exposed(work: float, communicate: float) -> float:
            return max(0.0, communicate - work) + _COPY_INTERFERENCE * min(communicate, work)

        add = 2 * 3 * others * sequence / (1e9 * self.profile.memory_gb_per_s)
        forward = exposed(overlapping, gather_forward) + exposed(overlapping, scatter) + add
        backward = exposed(overlapping, gather) + exposed(layer.weight_gradients, gather + scatter) + add
        return forward, backward

    def _sequence_bytes(self, sizes: Sizes, micro_batch: int) -> float:
        """Return the bytes of a layer's input, 2·B·S·H/C in 16 bits, which the ranks of tensor parallelism share."""
        job, (_, cp, *_) = self.job, sizes
        return micro_batch * job.seq_length * job.bytes_of_value / cp * job.shape.hidden_size

    def _gather_seconds(self, where: Span, sequence: float, product: Product) -> float:
        """Return the mean seconds of a gather for a product. Layers with this product in fp8 send a byte per value."""
        in_fp8 = network.gather_seconds(self.profile, where, sequence / self.job.bytes_of_value)
        share = self.job.fp8_share(product)
        return share * in_fp8 + (1 - share) * network.gather_seconds(self.profile, where, sequence)

    def _overlapped(self, where: Span, communicate: float, num_bytes: float, work: float) -> float:
        """Return the exposed seconds of a collective during `work`, plus the slowdown of this work."""
        share = self.base.interference(where, communicate, num_bytes)
        return max(0.0, communicate - work) + share * min(communicate, work)

    def _stages(self, candidate: Candidate) -> list[list[_Chunk]]:
        """Return the model chunks of every stage. Equal chunks share one result."""
        counts = self.job.chunk_layers(candidate.layout)
        last = len(counts) - 1
        found: dict[tuple[int, bool, bool], _Chunk] = {}

        def chunk(stage: int, number: int) -> _Chunk:
            is_first, is_last = stage == number == 0, stage == last and number == len(counts[stage]) - 1
            kind = (counts[stage][number], is_first, is_last)
            if kind not in found:
                found[kind] = self._chunk(candidate, *kind)
            return found[kind]

        return [[chunk(stage, number) for number in range(len(numbers))] for stage, numbers in enumerate(counts)]

    def _chunk(self, candidate: Candidate, layers: int, has_embedding: bool, has_output: bool) -> _Chunk:
        layout, size = candidate.layout, candidate.micro_batch
        layer = self.base.layer(layout.tp, layout.cp, size)
        communication = self._communication(self.base.sizes(candidate), size)
        tp_forward, tp_backward, cp_forward, cp_backward, collectives = communication
        forward, backward = layers * layer.forward, layers * layer.backward
        if self.job.has_fp8_products and not self.job.stack.keeps_transposed:
            parameters = layers * self.job.layer_parameters / layout.tp
            backward += compute.weight_transpose_seconds(self.machine, self.job, parameters)
        ends = [self.base.embedding(layout.tp, layout.cp, size)] * has_embedding
        ends += [self.base.output(layout.tp, layout.cp, size)] * has_output
        forward += sum(end[0] for end in ends)
        backward += sum(end[1] for end in ends)
        again = {"none": 0.0, "selective": layers * layer.attention, "full": layers * layer.forward}
        recompute = again[candidate.recompute]
        tp_again = tp_forward if candidate.recompute == "full" else 0.0
        cp_again = cp_forward if candidate.recompute != "none" else 0.0
        host = self.base.host(candidate, layer, collectives, 1.5 * collectives)
        exposed_forward = layers * (tp_forward + cp_forward)
        exposed_backward = layers * (tp_backward + tp_again + cp_backward + cp_again)
        launch_forward = max(0.0, layers * host[0] - forward - exposed_forward)
        launch_backward = max(0.0, layers * host[1] - backward - recompute - exposed_backward)
        return _Chunk(
            total=schedule.Chunk(
                forward=forward + exposed_forward + launch_forward,
                backward=backward + recompute + exposed_backward + launch_backward,
            ),
            compute=forward + backward,
            recompute=recompute,
            launch=launch_forward + launch_backward,
            tp=layers * (tp_forward + tp_backward + tp_again),
            cp=layers * (cp_forward + cp_backward + cp_again),
        )

    def _is_blocking(self, candidate: Candidate) -> bool:
        """Return whether pipeline stages wait for their sends. Only interleaved stages do not wait."""
        return candidate.layout.vp == 1

    def _send(self, candidate: Candidate) -> float:
        """Return the seconds to send a stage's output."""
        if candidate.layout.pp == 1:
            return 0.0
        where = self.base.geometry_of(candidate).pp
        return network.send_seconds(self.profile, where, self._sent_bytes(candidate), where.nic_ranks)

    def _sent_bytes(self, candidate: Candidate) -> float:
        """Return the bytes of a rank's part of a stage's output, 2·B·S·H/(C·T) in 16 bits."""
        return self._sequence_bytes(self.base.sizes(candidate), candidate.micro_batch) / candidate.layout.tp

    def parts(self, candidate: Candidate) -> dict[str, float]:
        job, layout, geometry = self.job, candidate.layout, self.base.geometry_of(candidate)
        micro_batches = candidate.num_micro_batches(job)
        stages, send, blocking = self._stages(candidate), self._send(candidate), self._is_blocking(candidate)
        totals = [[chunk.total for chunk in chunks] for chunks in stages]
        timeline = schedule.simulate(totals, micro_batches, send, blocking)
        reduces, gathers, fill = [], [], 0.0
        for stage, chunks in enumerate(totals):
            reduce, gather = self._replica_tails(candidate, stage, chunks)
            reduces.append(reduce)
            gathers.append(max(0.0, gather - fill))
            fill += chunks[0].forward + send
        updates = [self._update_seconds(candidate, stage) for stage in range(layout.pp)]
        ends = [end + tail for end, tail in zip(timeline.ends, reduces, strict=True)]
        last = max(range(layout.pp), key=ends.__getitem__)
        # The busiest stage shows where the time of a step goes. Its backward may end later than that of the last stage.
        busiest = max(range(layout.pp), key=lambda stage: timeline.busy[stage] + timeline.sending[stage])
        occupied = timeline.busy[busiest] + timeline.sending[busiest]
        reduce = reduces[last] - max(0.0, occupied - timeline.ends[last])
        chunks_there = stages[busiest]
        return {
            "compute": micro_batches * sum(chunk.compute for chunk in chunks_there),
            "recompute": micro_batches * sum(chunk.recompute for chunk in chunks_there),
            "launch": micro_batches * sum(chunk.launch for chunk in chunks_there),
            "tp": micro_batches * sum(chunk.tp for chunk in chunks_there),
            "cp": micro_batches * sum(chunk.cp for chunk in chunks_there),
            "pp": timeline.sending[busiest],
            "bubble": max(0.0, timeline.ends[last] - occupied),
            "dp": max(0.0, reduce) + self._tied_seconds(candidate, geometry) + max(gathers),
            "optimizer": max(updates) + self.profile.step_seconds,
        }

    def _tied_seconds(self, candidate: Candidate, geometry: Geometry) -> float:
        """Return the time of the final all-reduce of tied embedding gradients (megatron-core: finalize_model_grads)."""
        job, layout = self.job, candidate.layout
        if layout.pp == 1 or not job.shape.tied_embeddings:
            return 0.0
        return network.all_reduce_seconds(
            self.profile, geometry.ends, job.bytes_of_gradient * job.embedding_parameters / layout.tp
        )

    def _update_seconds(self, candidate: Candidate, stage: int) -> float:
        """Return the seconds of a stage's optimizer, and of the casts of its updated weights to fp8."""
        job, layout, parameters = self.job, candidate.layout, stage_parameters(self.job, candidate, stage)
        shards = megatron_variant(candidate).num_shards(layout)
        blocks = stage_layers(job, candidate, stage) * job.layer_parameters / layout.tp
        update = compute.optimizer_seconds(self.machine, job, parameters, parameters / shards)
        return update + compute.weight_cast_seconds(self.machine, job, blocks)

    def _replica_tails(self, candidate: Candidate, stage: int, chunks: Sequence[schedule.Chunk]) -> tuple[float, float]:
        """Return the exposed seconds to reduce a stage's gradients, and to gather its updated weights.

        The reduction overlaps with the last backward pass, and the gather with the first forward pass.
        """
        job, replicas = self.job, self.base.geometry_of(candidate).replicas
        backward, forward = sum(chunk.backward for chunk in chunks), sum(chunk.forward for chunk in chunks)
        parameters = stage_parameters(job, candidate, stage)
        pieces = self._num_buckets(candidate, stage, parameters)
        reduce, gather = self._replica_seconds(candidate, stage, pieces)
        times = 2 if self._all_reduces(candidate) else 1
        reduced, gathered = times * job.bytes_of_gradient * parameters, job.bytes_of_value * parameters
        return (
            self.base.tail(backward, reduce, reduced, pieces, replicas, self._overlaps_gradients(candidate)),
            self.base.tail(forward, gather, gathered, pieces, replicas, self._overlaps_parameters(candidate)),
        )

    def _all_reduces(self, candidate: Candidate) -> bool:
        """Return whether gradients are all-reduced, which moves twice the bytes of a reduce-scatter."""
        return megatron_variant(candidate).num_shards(candidate.layout) == 1

    def _overlaps_gradients(self, candidate: Candidate) -> bool:
        """Return whether gradients are reduced during backward."""
        return True

    def _overlaps_parameters(self, candidate: Candidate) -> bool:
        """Return whether updated weights are gathered during forward."""
        return True

    def _num_buckets(self, candidate: Candidate, stage: int, parameters: float) -> int:
        """Return the number of collectives that reduce a stage's gradients.

        megatron-core splits only the first stage's gradients, into buckets of 40 M parameters or 1 M per replica,
        whichever is larger (distributed_data_parallel.py).
        """
        if stage:
            return 1
        size = max(40e6, 1e6 * candidate.layout.data_parallel * candidate.layout.cp)
        return max(1, round(parameters / size))

    def _replica_seconds(self, candidate: Candidate, stage: int, calls: int) -> tuple[float, float]:
        """Return the seconds to reduce a rank's gradients over its replicas, and to gather the updated weights.

        A sharded optimizer uses a reduce-scatter and an all-gather of the weights; an unsharded one uses an all-reduce.
        If the optimizer state has several copies, the reduce-scatter is followed by an all-reduce of each shard over
        the ranks with copies of it (megatron-core: start_grad_sync).
        """
        geometry, shards = self.base.geometry_of(candidate), megatron_variant(candidate).num_shards(candidate.layout)
        replicas, parameters = geometry.replicas, stage_parameters(self.job, candidate, stage)
        gradients, weights = self.job.bytes_of_gradient * parameters, self.job.bytes_of_value * parameters
        if shards == 1:
            return network.all_reduce_seconds(self.profile, replicas, gradients, calls), 0.0
        inside, across = geometry.parted_replicas(shards) if shards < replicas.size else (replicas, None)
        reduce = network.gather_seconds(self.profile, inside, gradients, calls)
        if across:
            reduce += network.all_reduce_seconds(self.profile, across, gradients / shards, calls)
        return reduce, network.gather_seconds(self.profile, inside, weights, calls)
