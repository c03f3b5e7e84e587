"""Cost model of other training programs, as differences from megabench's engines. This module does not import torch."""

from dataclasses import replace
from functools import cache

from megabench.cost import compute, network, schedule
from megabench.cost.compute import LayerSeconds
from megabench.cost.job import Candidate, Job
from megabench.cost.memory import Memory
from megabench.cost.network import Span
from megabench.cost.profile import Profile
from megabench.cost.shared_costs import Base, Sizes
from megabench.hardware.topology import Topology
from megabench.planner.costs import Costs
from megabench.planner.engines import megatron_memory
from megabench.planner.engines.data_parallel_cost import DataParallel
from megabench.planner.engines.megatron_cost import Pipeline
from megabench.planner.engines.megatron_memory import megatron_variant, stage_layers, stage_parameters
from megabench.planner.engines.planned_engine import CostModel
from tools.planner_validation.programs import ProgramJob, ProgramProfile

_CAST, _TRANSPOSE = 4, 2  # bytes per element: a cast reads 2 and writes 1 in each of two layouts
# The number of kernels in a layer's forward pass, and the number of additional kernels if norms, rotary embedding and
# activation are not fused. The backward pass has about twice as many.
_KERNELS_FORWARD, _KERNELS_UNFUSED = 22, 20
# Seconds to copy one slice of a tensor before the gradients are reduced, and after the weights are gathered. Fitted to
# the playbook sweep's runs on 16 and more healthy nodes.
_SLICE_SECONDS = 12e-6
_QUEUED_KERNELS = 1024  # number of kernel launches that a CUDA stream queues before the host blocks


def _hidden_bytes(job: Job, candidate: Candidate) -> float:
    tokens = candidate.micro_batch * job.seq_length / candidate.layout.cp
    return tokens * job.shape.hidden_size * job.bytes_of_value


def more_activation_bytes(job: ProgramJob, candidate: Candidate) -> float:
    """Return the activation bytes that a layer keeps for backward, beyond those of megabench's engines.

    Without sequence parallelism, every rank stores whole norms. Dropout (GPT) stores masks of 2·H bytes, and with
    scores 3·N·S. Eager code also keeps copies: contiguous keys and values (4·K·D), the transposed attention output
    (2·N·D), and the SiLU of the gate (2·F), and no fp32 values of norms (arXiv 2205.05198, section 4).
    """
    shape, program, layout = job.shape, job.stack, candidate.layout
    tokens = candidate.micro_batch * job.seq_length / layout.cp
    undivided = 0.0 if program.sequence_parallel else 1 - 1 / layout.tp
    if candidate.recompute == "full":
        return tokens * 2 * shape.hidden_size * undivided
    norms = 8.0 if program.fused or program.copies_kept else 16.0
    more = norms * shape.hidden_size * undivided
    if program.dropout:
        more += 2 * shape.hidden_size * (1 / layout.tp + undivided)
        if not program.flash_attention and candidate.recompute == "none":
            more += 3 * shape.num_heads * job.seq_length / layout.tp
    if program.copies_kept:
        copies = shape.head_dim * (2 * shape.num_heads + 4 * shape.num_kv_heads) + 2 * shape.ffn_size
        more += (copies - (0 if program.fused else 8 * shape.hidden_size)) / layout.tp
    return tokens * more


def held_bytes(job: ProgramJob, candidate: Candidate) -> float:
    """Return the bytes that torch's allocator cannot reuse yet because NCCL's stream uses them (Tensor.record_stream).

    The allocator can reuse this memory once the GPU has finished the collective. The host runs ahead of the GPU by the
    number of kernels that CUDA queues. In a layer's backward pass, tensor-parallel collectives send or receive four
    gathered sequences of [B·S, H] in 16 bits: two input gradients before the scatter and two output gradients after the
    gather.
    """
    if not job.stack.holds_sent or candidate.layout.tp == 1:
        return 0.0
    kernels = 2 * (_KERNELS_FORWARD + (0 if job.stack.fused else _KERNELS_UNFUSED))
    return 4 * _hidden_bytes(job, candidate) * _QUEUED_KERNELS / kernels


class ProgramBase(Base):
    """A job of another training program on a topology, with the costs that its candidates share."""

    job: ProgramJob

    def __init__(self, job: ProgramJob, topology: Topology, profile: Profile) -> None:
        super().__init__(job, topology, _with_attention(job, profile))
        self.program = job.stack
        self.layer = cache(self._layer)
        self.output = cache(self._output)

    def _layer(self, tp: int, cp: int, micro_batch: int) -> LayerSeconds:
        """Return the mean seconds of a layer."""
        job, program = self.job, self.program
        plain = compute.layer_seconds(self.machine, job, tp, cp, micro_batch)
        tokens, fp8_share = micro_batch * job.seq_length / cp, job.fp8_share("forward")
        launches = program.launches_forward + fp8_share * program.launches_fp8
        between = compute.memory_seconds(self.machine, tokens * self._more_elementwise_bytes(tp))
        attention, attention_backward = self._more_attention_seconds(tp, cp, micro_batch)
        forward, backward = between + attention, 1.5 * between + attention_backward
        if fp8_share and program.delayed_scaling:
            casts = zip(self._cast_bytes(tp), compute.activation_cast_bytes(job, tp), strict=True)
            more = [compute.cast_seconds(self.machine, fp8_share * tokens * (its - ours)) for its, ours in casts]
            forward, backward = forward + more[0], backward + more[1]
        return replace(
            plain,
            forward=plain.forward + forward,
            backward=plain.backward + backward,
            attention=plain.attention + attention,
            host_forward=launches * self.profile.launch_seconds,
            host_backward=2 * launches * self.profile.launch_seconds,
        )

    def _more_elementwise_bytes(self, tp: int) -> float:
        """Return the bytes per token of elementwise operations beyond megabench's. Dropout moves 2 · 5·H bytes."""
        program, undivided = self.program, 0.0 if self.program.sequence_parallel else 1 - 1 / tp
        each = 20 * undivided + (10 * (1 / tp + undivided) if program.dropout else 0.0)
        return each * self.job.shape.hidden_size * (1.0 if program.fused else self.profile.unfused_traffic)

    def _more_attention_seconds(self, tp: int, cp: int, micro_batch: int) -> tuple[float, float]:
        """Return the seconds of attention beyond megabench's, forward and backward.

        Dropout of scores writes and reads 2 + 2 bytes and 1 for the mask. In a ring, attention has a part of the
        sequence in each of cp calls.
        """
        job, program = self.job, self.program
        if program.passes_keys and cp > 1:
            plain = compute.attention_seconds(self.machine, job, tp, cp, micro_batch)
            part = replace(job, seq_length=job.seq_length // cp)
            calls = compute.attention_seconds(self.machine, part, tp, 1, micro_batch)
            return cp * calls[0] - plain[0], cp * calls[1] - plain[1]
        if program.dropout and not program.flash_attention:
            scores = micro_batch * job.shape.num_heads / tp * job.seq_length**2 / cp
            dropout = compute.memory_seconds(self.machine, 5 * scores)
            return dropout, 1.5 * dropout
        return 0.0, 0.0

    def _cast_bytes(self, tp: int) -> tuple[float, float]:
        """Return the bytes per token for casting inputs and gradients to fp8 with delayed scaling.

        The kernels of norms and activation functions write fp8 values.
        """
        job, shape = self.job, self.job.shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        gradients = (q + 2 * kv + (job.ffn_matrices - 1) * shape.ffn_size + 2 * shape.hidden_size) / tp
        transposes = 0 if tp == 1 else _TRANSPOSE * 4 * shape.hidden_size
        return _CAST * q / tp, _CAST * gradients + transposes

    def _output(self, tp: int, cp: int, micro_batch: int) -> tuple[float, float]:
        plain = compute.output_seconds(self.machine, self.job, tp, cp, micro_batch)
        logits = micro_batch * self.job.seq_length / cp * self.job.shape.vocab_size / tp
        more = [a - b for a, b in zip(self.program.loss_bytes, compute.LOSS_BYTES, strict=True)]
        return (
            plain[0] + compute.memory_seconds(self.machine, more[0] * logits),
            plain[1] + compute.memory_seconds(self.machine, more[1] * logits),
        )


def _with_attention(job: ProgramJob, profile: Profile) -> Profile:
    """Return the profile with the program's flash attention. Short sequences do not slow FlashAttention-1 down."""
    if job.stack.flash_version == "cudnn":
        return profile
    share, half_length = profile.flash_2_share, profile.attention_half_length
    if job.stack.flash_version == 1:
        assert isinstance(profile, ProgramProfile)
        share, half_length = profile.flash_1_share, 0.0
    changes = {name: share * getattr(profile, name) for name in ("attention_forward", "attention_backward")}
    return profile.model_copy(update=changes | {"attention_half_length": half_length})


class ProgramDataParallel(DataParallel):
    """Cost model of data-parallel candidates of another training program."""

    base: ProgramBase

    def _copying_seconds(self, candidate: Candidate) -> float:
        return 0.0 if self.base.program.flat_parameters else super()._copying_seconds(candidate)


class ProgramPipeline(Pipeline):
    """Cost model of another training program with tensor, context or pipeline parallelism."""

    base: ProgramBase

    def __init__(self, base: ProgramBase) -> None:
        super().__init__(base)
        self.program = base.program
        if self.program.delayed_scaling:
            self.reduced_amaxes = 0

    def _tp_seconds(self, sizes: Sizes, micro_batch: int) -> tuple[float, float]:
        if not self.program.sequence_parallel:
            return self._all_reduce_tp_seconds(sizes, micro_batch)
        if self.program.user_buffers:
            return self._user_buffer_tp_seconds(sizes, micro_batch)
        return super()._tp_seconds(sizes, micro_batch)

    def _all_reduce_tp_seconds(self, sizes: Sizes, micro_batch: int) -> tuple[float, float]:
        """Return the exposed seconds without sequence parallelism.

        Each pass has two all-reduces, and those of backward overlap with the weight gradients.
        """
        layer, where = self.base.layer(*sizes[:2], micro_batch), self.base.geometry(*sizes).tp
        sequence = self._sequence_bytes(sizes, micro_batch)
        reduce = 2 * network.all_reduce_seconds(self.profile, where, sequence)
        return reduce, self._overlapped(where, reduce, 4 * sequence, layer.weight_gradients)

    def _user_buffer_tp_seconds(self, sizes: Sizes, micro_batch: int) -> tuple[float, float]:
        """Return the exposed seconds with user buffers.

        Forward has as many FLOPs as the input gradients. Half of these products overlap with gathers, tile by tile. The
        gathers of inputs for backward (method "bulk") overlap with one product that is not divided into tiles.
        """
        layer, where, tp = self.base.layer(*sizes[:2], micro_batch), self.base.geometry(*sizes).tp, sizes[0]
        sequence, work = self._sequence_bytes(sizes, micro_batch), layer.input_gradients / 2
        scatter = 2 * network.gather_seconds(self.profile, where, sequence)
        gather_forward = 2 * self._gather_seconds(where, sequence, "forward")
        gather = 2 * self._gather_seconds(where, sequence, "input_gradient")
        forward = schedule.hidden_tail(work, gather_forward, tp)
        forward += self.base.tail(work, scatter, 2 * sequence, tp, where, overlaps=True)
        backward = schedule.hidden_tail(work, gather, tp) + max(0.0, gather - work)
        return forward, backward + self._overlapped(where, scatter, 2 * sequence, layer.weight_gradients)

    def _is_blocking(self, candidate: Candidate) -> bool:
        return self.program.blocking_p2p and super()._is_blocking(candidate)

    def _sent_bytes(self, candidate: Candidate) -> float:
        return super()._sent_bytes(candidate) * (1 if self.program.sequence_parallel else candidate.layout.tp)

    def _update_seconds(self, candidate: Candidate, stage: int) -> float:
        """Return the seconds of the update, and those that copies into flat tensors add.

        Each rank holds all gradients and reduces them as one flat tensor. Gradients are read for the norm, read and
        written for clipping, and copied twice for the reduction (once by the program and once by torch). Gathered
        weights are copied three times. Python copies them slice by slice, and each tensor has a slice per replica
        (nanotron's optim/zero.py, distributed.py).
        """
        job, update = self.job, super()._update_seconds(candidate, stage)
        replicas = megatron_variant(candidate).num_shards(candidate.layout)
        if not self.program.flattens_shards or replicas == 1:
            return update
        copied = (7 * job.bytes_of_gradient + 6 * job.bytes_of_value) * stage_parameters(job, candidate, stage)
        slices = replicas * self.program.sliced_tensors * stage_layers(job, candidate, stage)
        return update + compute.memory_seconds(self.machine, copied) + _SLICE_SECONDS * slices

    def _overlaps_gradients(self, candidate: Candidate) -> bool:
        is_sharded = megatron_variant(candidate).shards_optimizer
        return self.program.overlaps_gradients and (not is_sharded or self.program.overlaps_sharded_gradients)

    def _overlaps_parameters(self, candidate: Candidate) -> bool:
        return self.program.overlaps_parameters

    def _num_buckets(self, candidate: Candidate, stage: int, parameters: float) -> int:
        if not self._overlaps_gradients(candidate) or (stage and not self.program.buckets_on_all_stages):
            return 1
        size = max(self.program.bucket_parameters, 1e6 * candidate.layout.data_parallel * candidate.layout.cp)
        return max(1, round(parameters / size))

    def _all_reduces(self, candidate: Candidate) -> bool:
        return self.program.broadcasts_tensors or super()._all_reduces(candidate)

    def _replica_seconds(self, candidate: Candidate, stage: int, calls: int) -> tuple[float, float]:
        """Return the seconds to reduce gradients, and to gather the updated weights or to broadcast whole tensors.

        The ranks that share the optimizer own whole tensors, and each sends them in one broadcast from rank to rank.
        With more ranks than tensors, some ranks own none (InternEvo: hybrid_zero_optim.py, broadcast_params).
        """
        if not self.program.broadcasts_tensors:
            return super()._replica_seconds(candidate, stage, calls)
        geometry, parameters = self.base.geometry_of(candidate), stage_parameters(self.job, candidate, stage)
        shards, replicas = megatron_variant(candidate).num_shards(candidate.layout), geometry.replicas
        owners = geometry.parted_replicas(shards)[0] if 1 < shards < replicas.size else replicas
        tensors = max(1, stage_layers(self.job, candidate, stage) * self.job.layer_tensors)
        reduce = network.all_reduce_seconds(self.profile, replicas, self.job.bytes_of_gradient * parameters, calls)
        weights = self.job.bytes_of_value * parameters
        return reduce, broadcast_seconds(self.profile, owners, weights, min(owners.size, tensors))


def broadcast_seconds(profile: Profile, where: Span, num_bytes: float, calls: int) -> float:
    """Return the seconds of broadcasts of `num_bytes` in total, in equal calls, from rank to rank in a ring.

    An all-gather sends (n − 1)/n of its bytes over each link of the ring, and a broadcast sends all of them.
    """
    if where.is_alone:
        return 0.0
    return network.gather_seconds(profile, where, num_bytes * where.size / (where.size - 1), calls)


class ProgramCosts(Costs):
    """Predicts candidates for one job of another training program on one topology."""

    base: ProgramBase

    def shared(self, job: Job, topology: Topology, profile: Profile) -> ProgramBase:
        assert isinstance(job, ProgramJob)
        return ProgramBase(job, topology, profile)

    def model(self, engine: str, base: Base) -> CostModel:
        assert isinstance(base, ProgramBase)
        match engine:
            case "megatron":
                return ProgramPipeline(base)
            case "fsdp":
                return ProgramDataParallel(base)
        return super().model(engine, base)

    def memory(self, candidate: Candidate) -> Memory:
        if candidate.engine != "megatron":
            return super().memory(candidate)
        stages = range(candidate.layout.pp)
        return max((self.stage_memory(candidate, stage) for stage in stages), key=lambda memory: memory.total)

    def stage_memory(self, candidate: Candidate, stage: int) -> Memory:
        """Return the memory of a rank on one stage of a pipeline."""
        job, layout = self.base.job, candidate.layout
        plain = megatron_memory.stage_memory(job, candidate, self.profile, stage)
        chunks, micro_batches = job.chunk_layers(layout)[stage], candidate.num_micro_batches(job)
        held = megatron_memory.layers_in_flight(stage, layout.pp, chunks, micro_batches)
        activations = held * more_activation_bytes(job, candidate)
        if candidate.recompute == "full":
            activations += more_activation_bytes(job, replace(candidate, recompute="none"))
        buffers = held_bytes(job, candidate)
        if not job.stack.sequence_parallel:
            inputs = megatron_memory.in_flight(stage, layout.pp, layout.vp, micro_batches) * (stage == 0)
            undivided = _hidden_bytes(job, candidate) * (1 - 1 / layout.tp)
            activations += undivided * inputs
            buffers += 2 * undivided * (layout.pp > 1)
        gradients = job.bytes_of_value * stage_parameters(job, candidate, stage) * job.stack.accumulates_at_end
        return replace(
            plain,
            gradients=plain.gradients + gradients,
            activations=plain.activations + activations,
            buffers=plain.buffers + buffers,
            allocator=plain.allocator + self.profile.allocator_share * (activations + buffers),
        )


def costs(job: Job, topology: Topology, profile: Profile) -> Costs:
    """Return the costs of a job in its training program, which is another one or megabench."""
    return ProgramCosts(job, topology, profile) if isinstance(job, ProgramJob) else Costs(job, topology, profile)
