"""Bytes that a GPU holds at the peak of a step, by part. Loads no torch."""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil

from megabench.cost.compute import kernels_forward
from megabench.cost.job import REDUCE_BUCKET, Candidate, Job
from megabench.cost.profile import Profile
from megabench.parallel.layout import Layout

_FUSED_LOSS_CHUNK = 2**29  # logits of a chunk, in elements: megabench/engines/cross_entropy.py
_GATHERED_LAYERS = 3  # that ZeRO-3 and FSDP hold whole: in use, prefetched, being reduced
_QUEUED_KERNELS = 1024  # launches that a CUDA stream takes before the host waits


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank. `allocator` is what torch's allocator reserves beyond what is held."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    allocator: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def layer_activation_bytes(job: Job, candidate: Candidate) -> float:
    """What one layer keeps for backward, of one micro-batch and rank.

    Llama with flash attention and sequence parallelism, a token: (8·H + 4·N·D + 4·K·D + 2·M·F)/T bytes, M FFN
    matrices, and 4·N/T for the softmax statistics. Without sequence parallelism the 8·H (16 bits in and out of two
    norms) are on every rank, and where gathered inputs are kept, half of them; GPT with dropout has its masks, 2·H, and
    scores without flash attention 5·N·S (dropout) or 2·N·S. Recomputed layers keep their input alone, 2·H (arXiv
    2205.05198, sections 4 and 5). Copies that eager code keeps: keys and values made contiguous (4·K·D), the
    attention's output turned round (2·N·D), the gate's SiLU (2·F). Context parallelism that exchanges heads keeps
    attention's output on both sides of the exchange.
    """
    shape, layout, stack = job.shape, candidate.layout, job.stack
    tokens = candidate.micro_batch * job.seq_length / layout.cp
    cut = layout.tp if stack.sequence_parallel else 1
    wide = job.bytes_of_value / 2
    if candidate.recompute == "full":
        return tokens * wide * 2 * shape.hidden_size / cut
    per_head = shape.head_dim * (4 * shape.num_heads + 4 * shape.num_kv_heads)
    values = (8 + 2 * stack.dropout) * shape.hidden_size / cut
    values += (per_head + 2 * job.ffn_matrices * shape.ffn_size) / layout.tp
    if job.exchanges_heads(layout.tp, layout.cp):
        values += 2 * shape.num_heads * shape.head_dim / layout.tp
    if stack.keeps_gathered:
        values += 4 * shape.hidden_size * (1 - 1 / cut)
    if stack.copies_kept:
        copies = shape.head_dim * (2 * shape.num_heads + 4 * shape.num_kv_heads) + 2 * shape.ffn_size
        values += copies / layout.tp
    elif not stack.fused:
        values += 8 * shape.hidden_size / cut  # norms in fp32
    scores = 0.0
    if stack.flash_attention:
        values += 4 * shape.num_heads / layout.tp
    elif candidate.recompute == "none":
        scores = (5 if stack.dropout else 2) * shape.num_heads * job.seq_length / layout.tp
    return tokens * wide * (values + scores)


def in_flight(stage: int, num_stages: int, chunks: int, num_micro_batches: int) -> float:
    """Micro-batches (of a whole stage) whose activations a stage holds at once.

    1F1B: min(P − stage, m). Interleaved: chunks in warm-up, 2·(P − stage − 1) + (v − 1)·P + 1, of v a micro-batch
    (arXiv 2104.04473, section 2.2); on the first stage 1 + (P − 1)/(P·v) times as many as 1F1B's.
    """
    if chunks == 1:
        return min(num_stages - stage, num_micro_batches)
    warm_up = 2 * (num_stages - stage - 1) + (chunks - 1) * num_stages + 1
    return min(warm_up, num_micro_batches * chunks) / chunks


def logit_bytes(job: Job, candidate: Candidate) -> float:
    """The output layer's logits [B·S, V/T] and what cross-entropy makes of them, on the last stage.

    In fp32 twice: values, and softmax, which becomes the gradient; those in 16 bits are gone by then. The fused loss
    holds chunks of bf16, and its fp32 gradient of the weights beside its 16-bit one.
    """
    tokens = candidate.micro_batch * job.seq_length / candidate.layout.cp
    rows = job.shape.vocab_size / candidate.layout.tp
    if job.stack.fused_loss:
        chunk = min(tokens * rows, _FUSED_LOSS_CHUNK)
        return 4 * chunk + (4 + 2) * rows * job.shape.hidden_size
    return 8 * tokens * rows


def held_bytes(job: Job, candidate: Candidate) -> float:
    """What torch's allocator may not give out again because NCCL's stream was given it (Tensor.record_stream).

    It waits until the GPU is past the collective, and the host runs ahead by as many kernels as CUDA queues. In a
    layer's backward four gathered sequences, [B·S, H] in 16 bits, go to or come from tensor-parallel collectives:
    two input gradients before they are scattered, two output gradients after they are gathered.
    """
    if not job.stack.holds_sent or candidate.layout.tp == 1:
        return 0.0
    kernels = 2 * kernels_forward(job)
    tokens = candidate.micro_batch * job.seq_length / candidate.layout.cp
    return 4 * job.bytes_of_value * tokens * job.shape.hidden_size * _QUEUED_KERNELS / kernels


def megatron_memory(job: Job, candidate: Candidate, profile: Profile) -> Memory:
    """The fullest stage of a tensor- and pipeline-parallel run, its optimizer sharded over dp·cp or not.

    Of equal stages the first holds the most activations, and the last the logits.
    """
    last = candidate.layout.pp - 1
    stages = range(last + 1) if job.stack.stages == "filled" else sorted({0, last})
    return max((stage_memory(job, candidate, profile, stage) for stage in stages), key=lambda memory: memory.total)


def stage_parameters(job: Job, candidate: Candidate, stage: int) -> float:
    """Parameters of a rank of this stage: its layers, and the embedding and output layer at the ends, over tp."""
    layout, shape = candidate.layout, job.shape
    layers = stage_layers(job, candidate, stage)
    ends = (stage == 0) + (stage == layout.pp - 1)
    if shape.tied_embeddings and layout.pp == 1:
        ends = 1
    return (layers * job.layer_parameters + ends * job.embedding_parameters) / layout.tp


def stage_layers(job: Job, candidate: Candidate, stage: int) -> int:
    """How many layers a stage holds, in all its chunks."""
    return all_stage_layers(job, candidate)[stage]


def all_stage_layers(job: Job, candidate: Candidate) -> tuple[int, ...]:
    """How many layers each stage holds."""
    layout, is_filled = candidate.layout, job.stack.stages == "filled"
    return _cut(job.shape.num_layers, is_filled, job.output_cost, layout.pp, layout.vp)


@lru_cache(maxsize=4096)
def _cut(layers: int, is_filled: bool, output_cost: float, num_stages: int, chunks: int) -> tuple[int, ...]:
    """The layers of every stage, the output layer counting as `output_cost` of them (Layout.chunk_layers).

    Filled (nanotron): stages are filled in turn up to their part of the whole.
    """
    if is_filled:
        each = (layers + output_cost) / num_stages
        filled = [min(layers, ceil(number * each)) for number in range(num_stages)] + [layers]
        return tuple(after - before for before, after in pairwise(filled))
    stages = Layout(pp=num_stages, vp=chunks).chunk_layers(layers, output_cost)
    return tuple(sum(map(len, stage)) for stage in stages)


def stage_memory(job: Job, candidate: Candidate, profile: Profile, stage: int) -> Memory:
    """A rank of one stage."""
    layout = candidate.layout
    parameters = stage_parameters(job, candidate, stage)
    shards = layout.data_parallel * layout.cp if candidate.zero_stage else 1
    layers = stage_layers(job, candidate, stage)
    kept = layer_activation_bytes(job, candidate)
    micro_batches = in_flight(stage, layout.pp, layout.vp, candidate.num_micro_batches(job))
    activations = kept * layers * micro_batches
    tokens = candidate.micro_batch * job.seq_length / layout.cp
    sequence_cut = layout.tp if job.stack.sequence_parallel else 1
    hidden = tokens * job.shape.hidden_size * job.bytes_of_value
    activations += hidden / sequence_cut * micro_batches * (stage == 0)
    if candidate.recompute == "full":
        activations += layer_activation_bytes(job, _without_recompute(candidate))  # of the layer being computed again
    # gathered sequence of a layer's products, forward or backward; what is received from the next stages
    buffers = 2 * hidden * (layout.tp > 1) + 2 * hidden / sequence_cut * (layout.pp > 1)
    buffers += held_bytes(job, candidate)
    new_gradients = job.bytes_of_value if job.stack.accumulates_at_end else 0
    return _with_allocator(
        profile.allocator_share,
        weights=job.bytes_of_value * parameters,
        gradients=(job.bytes_of_gradient + new_gradients) * parameters,
        optimizer=job.bytes_of_state * parameters / shards,
        activations=activations,
        logits=logit_bytes(job, candidate) if stage == layout.pp - 1 else 0.0,
        buffers=buffers,
    )


def data_parallel_memory(job: Job, candidate: Candidate, profile: Profile) -> Memory:
    """A rank of DeepSpeed, FSDP2 or DDP. Bytes a parameter, n ranks, gradients of g bytes (megabench's engines):

    - ZeRO-0: 2 + g + 12; ZeRO-1: 2 + g + 12/n; ZeRO-2: 2 + (g + 12)/n; ZeRO-3: (2 + g + 12)/n; one bucket being reduced
    - ZeRO-1 reduces fp32 gradients of 16-bit values into a part of its own, g/n (stage_1_and_2.py, compact buffers);
      with one micro-batch all others come while activations go
    - FSDP2, fp32 shards: (4 + g + 8)/n; embedding and output layer stay whole from forward to backward, and are
      reduced one at a time. What it gathers it frees at once, in order, so that little is lost between.
    - DDP, fp32 replicas and buckets: 4 + 4 + 8, and a cast of every matrix that backward keeps, unless it computes it
      again: 2
    and, of ZeRO-3 and FSDP2, a few whole layers, or all that are kept. (arXiv 1910.02054, section 5; torch's
    fully_shard.) Without AdamW's moments 8 less. Offloaded optimizers have no state here; ZeRO-3's and FSDP2's
    gradients are with them.
    """
    ranks, parameters, g = candidate.layout.world_size, job.num_parameters, job.bytes_of_gradient
    value, state, moments = job.bytes_of_value, job.bytes_of_state, job.bytes_of_moments
    layer = job.layer_parameters
    ends = job.embedding_parameters * (1 if job.shape.tied_embeddings else 2)
    kept = layer_activation_bytes(job, candidate) * job.shape.num_layers
    tokens = candidate.micro_batch * job.seq_length
    kept += tokens * job.shape.hidden_size * job.bytes_of_value
    if candidate.recompute == "full":
        kept += layer_activation_bytes(job, _without_recompute(candidate))  # of the layer being computed again
    whole = cast = buffers = 0.0
    if candidate.engine == "deepspeed":
        stage = candidate.zero_stage
        weights = value * parameters / (ranks if stage == 3 else 1)
        gradients = g * parameters / (ranks if stage >= 2 else 1)
        optimizer = state * parameters / (ranks if stage >= 1 else 1)
        if stage == 1 and g > value:
            accumulates = candidate.num_micro_batches(job) > 1
            gradients = (gradients if accumulates else max(0.0, gradients - kept)) + gradients / ranks
        if stage == 3:
            whole = value * (parameters if candidate.keeps_weights else _GATHERED_LAYERS * layer + ends)
            weights += value * parameters / candidate.hpz_size if candidate.hpz_size else 0.0
        if stage >= 1:
            buffers += 2 * g * min(REDUCE_BUCKET if stage == 3 else job.reduce_bucket, parameters)
    elif candidate.engine == "fsdp":
        shards = candidate.shard_size or ranks
        weights, gradients = 4 * parameters / shards, g * parameters / shards
        optimizer = moments * parameters / shards
        whole = value * (parameters if candidate.keeps_weights else _GATHERED_LAYERS * layer + ends)
        buffers = g * layer + (g + value) * job.embedding_parameters
    else:
        cast = value if value < 4 and candidate.recompute != "full" else 0.0
        weights, gradients, optimizer = (4 + cast) * parameters, 4 * parameters, moments * parameters
    if candidate.offload != "none":
        optimizer = 0.0
        gradients = gradients if candidate.zero_stage in (1, 2) else 0.0
    if candidate.offload == "all":
        weights = 0.0
    share = profile.allocator_share
    weights_come_and_go = cast or (whole and candidate.engine == "deepspeed")
    if weights_come_and_go and profile.gather_allocator_share is not None:
        share = profile.gather_allocator_share
    return _with_allocator(
        share,
        weights=weights + whole,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept,
        logits=logit_bytes(job, candidate),
        buffers=buffers,
    )


def host_bytes(job: Job, candidate: Candidate, ranks_per_host: int) -> float:
    """Host memory that offload takes on each host: masters, moments and gradients, and with "all" the weights."""
    if candidate.offload == "none":
        return 0.0
    each = job.bytes_of_state + job.bytes_of_gradient + (job.bytes_of_value if candidate.offload == "all" else 0)
    return each * job.num_parameters * ranks_per_host / candidate.layout.world_size


def memory_of(job: Job, candidate: Candidate, profile: Profile) -> Memory:
    """The fullest rank of a candidate."""
    if candidate.engine == "megatron":
        return megatron_memory(job, candidate, profile)
    return data_parallel_memory(job, candidate, profile)


def _without_recompute(candidate: Candidate) -> Candidate:
    return replace(candidate, recompute="none")


def _with_allocator(share: float, **parts: float) -> Memory:
    """Fragments grow with what comes and goes, not with what stays (weights, gradients, optimizer)."""
    comes_and_goes = parts["activations"] + parts["logits"] + parts["buffers"]
    return Memory(**parts, allocator=share * comes_and_goes)
