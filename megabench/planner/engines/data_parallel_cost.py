"""Cost model of a step of ZeRO 0 to 3 (with and without offload), FSDP2, Megatron-FSDP and DDP. Loads no torch."""

from megabench.cost import compute, network, schedule
from megabench.cost.geometry import Geometry
from megabench.cost.job import Candidate
from megabench.cost.shared_costs import Base
from megabench.optim.optimizers import OPTIMIZERS
from megabench.planner.engines.sharding import gathered_bytes, keeps_weight_casts, sharding_of
from megabench.specs.deepspeed import REDUCE_BUCKET

_DDP_BUCKET = 25e6 / 4  # parameters per DDP bucket: 25 MB of fp32 gradients
# Host time of hooks, forward and backward, in units of one kernel launch: per layer for FSDP2, per parameter for
# DeepSpeed. DeepSpeed's hooks and queues run in Python. The host limits the step in the studies that these values are
# from: benchmarks/host-time for FSDP2, and benchmarks/gpt2-zero for DeepSpeed.
_FSDP_HOOKS, _ZERO3_HOOKS, _ZERO_HOOKS = (90, 180), (17, 34), (0, 16)
# Bytes per parameter that the host reads and writes under DeepSpeed, in addition to the optimizer's, to clip the
# gradient and to cast the new weight.
_DEEPSPEED_HOST_BYTES = 8 + 6


class DataParallel:
    """Cost model of data-parallel candidates."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.job, self.profile, self.machine = base.job, base.profile, base.machine

    def parts(self, candidate: Candidate) -> dict[str, float]:
        job, geometry = self.job, self.base.geometry_of(candidate)
        layers, micro_batches = job.shape.num_layers, candidate.num_micro_batches(job)
        layer = self.base.layer(1, 1, candidate.micro_batch)
        first, last = self.base.embedding(1, 1, candidate.micro_batch), self.base.output(1, 1, candidate.micro_batch)
        again = layer.forward if candidate.recompute == "full" else 0.0
        gather, gather_back, reduce, ends = self._sharded_seconds(candidate, geometry)
        host = self.base.host(candidate, layer, gather > 0, (gather_back > 0) + (reduce > 0))
        hooks = self._hook_seconds(candidate)
        forward = max(layer.forward, host[0] + hooks[0])
        backward = max(layer.backward + again, host[1] + hooks[1])
        sharding = sharding_of(candidate)
        shards = sharding.shard_size
        where = geometry.neighbours(shards) if shards else geometry.world
        parameters = job.layer_parameters
        weights, gradients = gathered_bytes(job, candidate) * parameters, job.bytes_of_gradient * parameters
        sent = 2 * gradients if sharding.zero_stage == 2 else gradients + (weights if gather_back else 0.0)
        hidden_forward = self.base.interference(where, gather, weights)
        hidden_backward = self.base.interference(where, gather_back + reduce, sent)
        with_communication = (
            schedule.two_streams(forward, gather, layers, hidden_forward)
            + schedule.two_streams(backward, gather_back + reduce, layers, hidden_backward)
            + ends
        )
        plain = layers * (layer.forward + layer.backward)
        plain += self._copying_seconds(candidate) + self._weight_cast_seconds(candidate)
        launch = layers * ((forward - layer.forward) + (backward - (layer.backward + again)))
        exposed = with_communication - layers * (forward + backward)
        once, update = self._once_a_step(candidate, geometry, layers * backward)
        return {
            "compute": micro_batches * (plain + sum(first) + sum(last)),
            "recompute": micro_batches * layers * again,
            "launch": micro_batches * launch,
            "dp": max(0.0, micro_batches * exposed) + once,
            "optimizer": update + self.profile.step_seconds,
            "offload": self._offload_seconds(candidate, geometry, micro_batches),
        }

    def shortest(self, candidate: Candidate) -> float:
        """Return the exact step time as the lower bound, because it is quick to compute."""
        return sum(self.parts(candidate).values())

    def _hook_seconds(self, candidate: Candidate) -> tuple[float, float]:
        """Return the host time of one layer's hooks, forward and backward."""
        stage = sharding_of(candidate).zero_stage
        if candidate.engine in ("fsdp", "megatron_fsdp"):
            times, hooks = 1, _FSDP_HOOKS
        elif stage:
            times, hooks = self.job.layer_tensors, _ZERO3_HOOKS if stage == 3 else _ZERO_HOOKS
        else:
            return 0.0, 0.0
        return times * hooks[0] * self.profile.launch_seconds, times * hooks[1] * self.profile.launch_seconds

    def _copying_seconds(self, candidate: Candidate) -> float:
        """Return the time of casts, copies and additions per micro-batch, without the gradient sums of `compute`.

        The formulas count bytes per parameter, with v bytes per value and g per gradient. Operations on a rank's own
        shard have a factor of 1/N.

        - DeepSpeed (stage3.py, stage_1_and_2.py, coalesced_collectives.py) casts gradients. Stages 2 and 3 copy them
          into a bucket, divide them, reorder them by rank, and accumulate the rank's own shard.
        - FSDP2 (_fsdp_collectives.py) casts its fp32 shards, copies them into the gather buffer, copies the gathered
          weights out, and copies gradients into the reduction buffer.
        - Megatron-FSDP (param_and_grad_buffer.py) casts gradients into the reduction buffer. Weights are gathered in
          place.
        - DDP casts fp32 weights, and casts gradients back. Compiled fp8 layers cast the weights again for backward.
        """
        job, sharding = self.job, sharding_of(candidate)
        w = gathered_bytes(job, candidate)  # of a block; the embedding and the output layer count as blocks here
        ranks, stage = sharding.shard_size or candidate.layout.world_size, sharding.zero_stage
        v, g, gathers = job.bytes_of_value, job.bytes_of_gradient, 1 if sharding.keeps_weights else 2
        if candidate.engine == "ddp":
            casts = (2 if candidate.recompute == "full" else 1) + candidate.is_compiled * job.fp8_share("forward")
            moved = _cast(4, v) * casts + _cast(v, 4) + 3 * 4
        elif candidate.engine == "fsdp":
            moved = 2 * gathers * w + (v + g) + (gathers * (_cast(4, v) + 2 * v) + 3 * g) / ranks
        elif candidate.engine == "megatron_fsdp":
            moved = _cast(v, g) + 3 * g / ranks
        elif stage == 3:
            moved = gathers * v + _cast(v, g) + 4 * g + 3 * g / ranks
        elif stage == 2:
            moved = _cast(v, g) + 6 * g + 5 * g / ranks
        else:
            moved = _cast(v, g) + 3 * g
        beyond = max(0.0, moved - compute.accumulated_bytes(job))
        return compute.memory_seconds(self.machine, beyond * job.num_parameters)

    def _weight_cast_seconds(self, candidate: Candidate) -> float:
        """Return the seconds per micro-batch for casting weights to fp8.

        Weights that are gathered in fp8, or kept in one layout, are transposed for the backward pass. Engines that keep
        the casts cast weights once per step, which `_once_a_step` counts.
        """
        job, forwards = self.job, 2 if candidate.recompute == "full" else 1
        keeps_casts = keeps_weight_casts(candidate)
        if keeps_casts and (job.stack.keeps_transposed or not job.has_fp8_products):
            return 0.0
        if keeps_casts or gathered_bytes(job, candidate) < job.bytes_of_value:
            return compute.weight_transpose_seconds(self.machine, job, job.block_parameters)
        return compute.repeated_weight_cast_seconds(self.machine, job, job.block_parameters, forwards)

    def _sharded_seconds(self, candidate: Candidate, geometry: Geometry) -> tuple[float, float, float, float]:
        """Return a layer's communication per micro-batch: forward gather, backward gather, gradient reduction, ends.

        "Ends" is the communication that no layer overlaps: the gather of the embedding at the start and its gradient at
        the end.

        ZeRO-3 and FSDP2 all-gather 2 bytes per parameter twice (`gathered_bytes` in blocks) and reduce-scatter g bytes
        (arXiv 1910.02054, section 7). ZeRO-2 all-reduces g bytes, and each rank keeps its shard (DeepSpeed's
        use_multi_rank_bucket_allreduce). hpZ gathers among neighbours in backward (arXiv 2306.10209). HSDP shards among
        neighbours. Weights that stay gathered after the forward pass are gathered only once per micro-batch.
        """
        job, profile, sharding = self.job, self.profile, sharding_of(candidate)
        layer, ends = job.layer_parameters, job.embedding_parameters
        value, g = job.bytes_of_value, job.bytes_of_gradient
        if sharding.zero_stage == 3:
            shards = sharding.shard_size
            where = geometry.neighbours(shards) if shards else geometry.world
            inner = geometry.neighbours(sharding.hpz_size) if sharding.hpz_size else where

            weights = gathered_bytes(job, candidate) * layer

            def reduce(parameters: float) -> float:
                return network.gather_seconds(profile, where, g * parameters)

            gather = network.gather_seconds(profile, where, weights)
            back = 0.0 if sharding.keeps_weights else network.gather_seconds(profile, inner, weights)
            gather_ends = network.gather_seconds(profile, where, value * ends)
            return gather, back, reduce(layer), gather_ends + reduce(ends)
        if sharding.zero_stage == 2:
            reduce_layer = network.all_reduce_seconds(profile, geometry.world, g * layer)
            return 0.0, 0.0, reduce_layer, network.all_reduce_seconds(profile, geometry.world, g * ends)
        return 0.0, 0.0, 0.0, 0.0

    def _once_a_step(self, candidate: Candidate, geometry: Geometry, backward: float) -> tuple[float, float]:
        """Return the seconds of exposed communication once per step, and of the optimizer."""
        job, parameters = self.job, self.job.num_parameters
        sharding, is_ddp = sharding_of(candidate), candidate.engine == "ddp"
        ranks, once, copied = candidate.layout.world_size, 0.0, 0.0
        gradients, weights = job.bytes_of_gradient * parameters, job.bytes_of_value * parameters
        sharded = parameters / (ranks if sharding.shards_across else sharding.shard_size or ranks)
        if sharding.zero_stage == 0:
            pieces = max(1, round(parameters / (_DDP_BUCKET if is_ddp else REDUCE_BUCKET)))
            reduce = network.all_reduce_seconds(self.profile, geometry.world, gradients, pieces)
            once = self.base.tail(backward, reduce, 2 * gradients, pieces, geometry.world, overlaps=is_ddp)
            sharded = parameters
        elif sharding.shard_size:  # HSDP replicas all-reduce gradients once per step, after the last micro-batch
            across = geometry.apart(sharding.shard_size)
            if sharding.shards_across:
                reduce = network.gather_seconds(self.profile, across, gradients / sharding.shard_size)
                gathered = weights / sharding.shard_size
                gather = network.gather_seconds(self.profile, across, gathered)
                # overlapped with the first forward pass, which takes about half as long as backward
                waits = self.base.tail(backward / 2, gather, gathered, job.shape.num_layers, across, overlaps=True)
            else:
                reduce = network.all_reduce_seconds(self.profile, across, gradients / sharding.shard_size)
                waits = 0.0
            reduced = (1 if sharding.shards_across else 2) * gradients / sharding.shard_size
            once = waits + self.base.tail(backward, reduce, reduced, job.shape.num_layers, across, overlaps=True)
        elif sharding.zero_stage < 3:
            once = network.gather_seconds(self.profile, geometry.world, weights)
            if sharding.zero_stage == 1:
                pieces = max(1, round(parameters / REDUCE_BUCKET))
                reduce = network.all_reduce_seconds(self.profile, geometry.world, gradients, pieces)
                once += self.base.tail(backward, reduce, 2 * gradients, pieces, geometry.world, overlaps=True)
                copied = (6 + 2 / ranks) * gradients  # ZeRO-1 copies gradients as stage 2 does, but only once per step
        cast = 0.0
        if keeps_weight_casts(candidate):
            cast = compute.weight_cast_seconds(self.machine, job, job.block_parameters)
        update = cast + compute.memory_seconds(self.machine, copied)
        if sharding.offload == "none":
            update += compute.optimizer_seconds(self.machine, job, sharded, sharded)
        return once, update

    def _offload_seconds(self, candidate: Candidate, geometry: Geometry, micro_batches: int) -> float:
        """Return the time of copies to and from the host and of the host's optimizer (arXiv 2101.06840).

        All GPUs of a server share its memory bandwidth, also those of several hosts (pods) on it. Gradients have g
        bytes per parameter, and a step has m micro-batches.

        - FSDP2 copies the gradients to the host in each micro-batch.
        - ZeRO-3 copies them to the host and back m times, to accumulate them and compute the norm on the GPU
          (DeepSpeed's stage3.py, partition_grads).
        - ZeRO-2 copies them to the host m times and back m − 1 times. fp32 gradients stay on the GPU instead.
        - ZeRO-1 always keeps them on the GPU (stage_1_and_2.py, copy_grads_in_partition).

        At the end of a step, DeepSpeed copies fp32 gradients to the optimizer. An offloaded optimizer copies the
        updated weights to the GPU once per step. If weights are offloaded, every gather copies them.
        """
        sharding = sharding_of(candidate)
        if sharding.offload == "none":
            return 0.0
        job, is_fsdp = self.job, candidate.engine == "fsdp"
        g, update = job.bytes_of_gradient, job.mean_bytes(OPTIMIZERS[job.optimizer].update_bytes)
        on_host = update + (0 if is_fsdp else _DEEPSPEED_HOST_BYTES)
        if is_fsdp:
            gradients = g * micro_batches
        elif sharding.zero_stage == 3:
            gradients = 2 * g * micro_batches + 4
        elif sharding.zero_stage == 2 and g == job.bytes_of_value and micro_batches > 1:
            gradients = g * (2 * micro_batches - 1) + 4
        else:
            gradients = 4
        each = 4 if is_fsdp else job.bytes_of_value  # FSDP2's shards are fp32
        moved = gradients + each * (2 * micro_batches if sharding.offload == "all" else 1)
        shard = job.num_parameters / candidate.layout.world_size
        seconds = moved * shard / (self.profile.host_copy_gb_per_s * 1e9)
        return seconds + on_host * shard * geometry.ranks_per_server / (self.profile.dram_gb_per_s * 1e9)


def _cast(before: int, after: int) -> int:
    """Return the bytes read and written to cast one element from one size to another."""
    return before + after if before != after else 0
