"""Cost model of a step under tensor, context and pipeline parallelism (the megatron engine). Loads no torch."""

from dataclasses import dataclass
from functools import cache

from megabench.cost import compute, network, schedule
from megabench.cost.geometry import Geometry
from megabench.cost.job import Candidate
from megabench.cost.network import Span
from megabench.cost.shared_costs import Base, Sizes
from megabench.specs.megatron_memory import all_chunk_layers, megatron_variant, stage_layers, stage_parameters


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

        With sequence parallelism, a layer's forward pass gathers 2·B·S·H/C bytes twice and reduce-scatters them twice.
        Its backward pass gathers the output gradients twice. The backward pass also gathers inputs that forward did not
        keep, overlapped with the input gradients, and reduce-scatters, overlapped with the weight gradients (arXiv
        2205.05198, figure 5; megatron-core's layers). Without sequence parallelism, each pass has two all-reduces, and
        those of backward overlap with the weight gradients.

        In fp8 layers, gathers send fp8 values, B·S·H/C bytes, and reduce-scatters still send 2·B·S·H/C. Each pass
        all-reduces the largest values of four tensors over the tp·cp ranks that have parts of them
        (engines/megatron/fp8_linear.py). With bf16 gradients, this applies only to the forward pass.

        Context parallelism either exchanges queries, keys, values and the attention output, 4·B·S/C·(N + K)·D/T bytes
        in total, or gathers keys and values, 4·B·S·K·D/T bytes.
        """
        job, geometry, (tp, cp_size, *_) = self.job, self.base.geometry(*sizes), sizes
        fp8_forward, fp8_backward = job.fp8_share("forward"), job.fp8_share("input_gradient")
        layer = self.base.layer(tp, cp_size, micro_batch)
        values = micro_batch * job.seq_length * job.bytes_of_value
        sequence = values / cp_size * job.shape.hidden_size
        tp_forward = tp_backward = cp = 0.0
        if tp > 1:
            scatter = network.gather_seconds(self.profile, geometry.tp, sequence)
            in_fp8 = network.gather_seconds(self.profile, geometry.tp, sequence / job.bytes_of_value)
            gather = fp8_backward * in_fp8 + (1 - fp8_backward) * scatter
            if job.stack.sequence_parallel:
                gather_forward = fp8_forward * in_fp8 + (1 - fp8_forward) * scatter
                tp_forward = 2 * gather_forward + 2 * scatter
                waits = 2 * gather
                again = 0.0 if job.stack.keeps_gathered else 2 * gather
                hidden = [
                    (again, 2 * sequence, layer.input_gradients),
                    (2 * scatter, 2 * sequence, layer.weight_gradients),
                ]
                if job.stack.user_buffers:
                    # Forward has as many FLOPs as the input gradients. Half of these products overlap with gathers,
                    # tile by tile. The gathers of inputs for backward (method "bulk") overlap with one whole product.
                    work = layer.input_gradients / 2
                    tp_forward = schedule.hidden_tail(work, 2 * gather_forward, tp)
                    tp_forward += self.base.tail(work, 2 * scatter, 2 * sequence, tp, geometry.tp, overlaps=True)
                    waits = schedule.hidden_tail(work, waits, tp) + max(0.0, again - work)
                    hidden = hidden[1:]
            else:
                tp_forward = 2 * network.all_reduce_seconds(self.profile, geometry.tp, sequence)
                waits, hidden = 0.0, [(tp_forward, 4 * sequence, layer.weight_gradients)]
            if job.stack.overlaps_tp_backward:
                for communicate, num_bytes, work in hidden:
                    share = self.base.interference(geometry.tp, communicate, num_bytes)
                    waits += max(0.0, communicate - work) + share * min(communicate, work)
                tp_backward = waits
            else:
                tp_backward = waits + sum(communicate for communicate, _, _ in hidden)
        exchanges = 2 * job.exchanges_heads(tp, cp_size)
        if exchanges:
            heads = 2 * (job.shape.num_heads + job.shape.num_kv_heads) * job.shape.head_dim / tp
            cp = network.exchange_seconds(self.profile, geometry.cp, values / cp_size * heads, exchanges)
        elif cp_size > 1:
            keys = 2 * values * job.shape.num_kv_heads * job.shape.head_dim / tp
            cp = network.gather_seconds(self.profile, geometry.cp, keys)
        collectives: float = (tp > 1) * 4 + (exchanges or cp_size > 1)
        cp_forward = cp_backward = cp
        if fp8_forward and tp * cp_size > 1 and not job.stack.delayed_scaling:
            agree = network.all_reduce_seconds(self.profile, geometry.neighbours(tp * cp_size), 4 * 4, calls=4)
            if tp > 1:
                tp_forward, tp_backward = tp_forward + fp8_forward * agree, tp_backward + fp8_backward * agree
            else:
                cp_forward, cp_backward = cp + fp8_forward * agree, cp + fp8_backward * agree
            collectives += 4 * fp8_forward
        return tp_forward, tp_backward, cp_forward, cp_backward, collectives

    def _stages(self, candidate: Candidate) -> list[list[_Chunk]]:
        """Return the model chunks of every stage. Equal chunks share one result."""
        counts = all_chunk_layers(self.job, candidate)
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
        return self.job.stack.blocking_p2p and candidate.layout.vp == 1

    def _send(self, candidate: Candidate) -> float:
        """Return the seconds to send a stage's output: 2·B·S·H/C bytes, divided by tp under sequence parallelism."""
        layout, geometry = candidate.layout, self.base.geometry_of(candidate)
        if layout.pp == 1:
            return 0.0
        values = candidate.micro_batch * self.job.seq_length / layout.cp * self.job.shape.hidden_size
        cut = layout.tp if self.job.stack.sequence_parallel else 1
        num_bytes = values * self.job.bytes_of_value / cut
        return network.send_seconds(self.profile, geometry.pp, num_bytes, geometry.ranks_per_node)

    def parts(self, candidate: Candidate) -> dict[str, float]:
        job, layout, geometry = self.job, candidate.layout, self.base.geometry_of(candidate)
        micro_batches = candidate.num_micro_batches(job)
        stages, send, blocking = self._stages(candidate), self._send(candidate), self._is_blocking(candidate)
        totals = [[chunk.total for chunk in chunks] for chunks in stages]
        timeline = schedule.simulate(totals, micro_batches, send, blocking)
        reduces, gathers, updates = [], [], []
        fill, replicas = 0.0, geometry.replicas
        shards = megatron_variant(candidate).num_shards(layout)
        spans = geometry.parted_replicas(shards) if 1 < shards < replicas.size else (replicas, None)
        for stage, chunks in enumerate(totals):
            parameters = stage_parameters(job, candidate, stage)
            pieces = self._num_buckets(candidate, stage, parameters)
            if job.stack.broadcasts_tensors:
                reduce, gather = self._owner_seconds(candidate, stage, (replicas, spans[0]), parameters, pieces)
            else:
                reduce, gather = self._replica_seconds(candidate, spans, parameters, pieces)
            backward, forward = sum(chunk.backward for chunk in chunks), sum(chunk.forward for chunk in chunks)
            is_all_reduce = shards == 1 or job.stack.broadcasts_tensors
            reduced = (2 if is_all_reduce else 1) * job.bytes_of_gradient * parameters
            overlaps = self._overlaps_gradients(candidate)
            reduces.append(self.base.tail(backward, reduce, reduced, pieces, replicas, overlaps))
            gathered = job.bytes_of_value * parameters
            waits = self.base.tail(forward, gather, gathered, pieces, replicas, job.stack.overlaps_parameters)
            gathers.append(max(0.0, waits - fill))
            fill += chunks[0].forward + send
            update = compute.optimizer_seconds(self.machine, job, parameters, parameters / shards)
            blocks = stage_layers(job, candidate, stage) * job.layer_parameters / layout.tp
            update += compute.weight_cast_seconds(self.machine, job, blocks)
            if job.stack.flattens_shards and shards > 1:
                update += compute.flattening_seconds(self.machine, job, parameters)
            updates.append(update)
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

    def _overlaps_gradients(self, candidate: Candidate) -> bool:
        stack, is_sharded = self.job.stack, megatron_variant(candidate).shards_optimizer
        return stack.overlaps_gradients and (not is_sharded or stack.overlaps_sharded_gradients)

    def _num_buckets(self, candidate: Candidate, stage: int, parameters: float) -> int:
        """Return the number of collectives that reduce a stage's gradients.

        megatron-core splits only the first stage's gradients, into buckets of 40 M parameters or 1 M per replica,
        whichever is larger (distributed_data_parallel.py).
        """
        if not self._overlaps_gradients(candidate) or (stage and not self.job.stack.buckets_on_all_stages):
            return 1
        size = max(self.job.stack.bucket_parameters, 1e6 * candidate.layout.data_parallel * candidate.layout.cp)
        return max(1, round(parameters / size))

    def _replica_seconds(
        self, candidate: Candidate, spans: tuple[Span, Span | None], parameters: float, calls: int
    ) -> tuple[float, float]:
        """Return the seconds to reduce a rank's gradients over its replicas, and to gather the updated weights.

        A sharded optimizer uses a reduce-scatter and an all-gather of the weights over the first of the `spans`; an
        unsharded one uses an all-reduce. If the optimizer state has several copies, the reduce-scatter is followed by
        an all-reduce of each shard over the second span (megatron-core: start_grad_sync).
        """
        (inside, across), shards = spans, megatron_variant(candidate).num_shards(candidate.layout)
        gradients, weights = self.job.bytes_of_gradient * parameters, self.job.bytes_of_value * parameters
        if shards == 1:
            return network.all_reduce_seconds(self.profile, inside, gradients, calls), 0.0
        reduce = network.gather_seconds(self.profile, inside, gradients, calls)
        if across:
            reduce += network.all_reduce_seconds(self.profile, across, gradients / shards, calls)
        return reduce, network.gather_seconds(self.profile, inside, weights, calls)

    def _owner_seconds(
        self, candidate: Candidate, stage: int, spans: tuple[Span, Span], parameters: float, calls: int
    ) -> tuple[float, float]:
        """Return the seconds to all-reduce gradients over replicas, and for owners to broadcast the updated weights.

        Each of the ranks in the second span owns whole tensors and sends them in one broadcast. With more ranks than
        tensors, some ranks own none (InternEvo: hybrid_zero_optim.py, broadcast_params).
        """
        replicas, owners = spans
        tensors = max(1, stage_layers(self.job, candidate, stage) * self.job.layer_tensors)
        reduce = network.all_reduce_seconds(self.profile, replicas, self.job.bytes_of_gradient * parameters, calls)
        weights = self.job.bytes_of_value * parameters
        return reduce, network.broadcast_seconds(self.profile, owners, weights, min(owners.size, tensors))
