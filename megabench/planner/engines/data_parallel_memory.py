"""GPU and host memory under DeepSpeed ZeRO 0 to 3, FSDP2 and DDP, in bytes. Loads no torch."""

from dataclasses import dataclass

from megabench.cost.job import Candidate, Job
from megabench.cost.memory import (
    Memory,
    layer_activation_bytes,
    logit_bytes,
    recomputed_bytes,
    weight_cast_bytes,
    with_allocator,
)
from megabench.cost.profile import Profile
from megabench.planner.engines.sharding import gathered_bytes, keeps_weight_casts, sharding_of
from megabench.specs.deepspeed import REDUCE_BUCKET, reduce_bucket

# number of layers that ZeRO-3 and FSDP2 hold unsharded: one in use, one prefetched, one being reduced
_GATHERED_LAYERS = 3
# Numbers of parameters that Megatron-FSDP gathers ahead, and whose gradients it queues before it reduces them
# (megatron_fsdp.py: suggested_AG_prefetch_size, suggested_RS_queue_capacity)
_MEGATRON_PREFETCH, _MEGATRON_QUEUE = 500_000_000, 1_000_000_000


@dataclass(frozen=True)
class _State:
    """The bytes of weights, gradients and optimizer state on one rank, before offload.

    `gathered` are weights that are unsharded for a while. `casts` are DDP's 16-bit casts, which backward frees.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float = 0.0
    casts: float = 0.0
    buffers: float = 0.0


def data_parallel_memory(job: Job, candidate: Candidate, profile: Profile) -> Memory:
    """Return the memory of one rank of DeepSpeed, FSDP2, Megatron-FSDP or DDP.

    The functions of the engines state the bytes per parameter with AdamW, for n ranks and gradients of g bytes
    (megabench's engines). Optimizers without AdamW's moments use 8 bytes per parameter less. With fp8 products, engines
    that keep the casts of weights use `weight_cast_bytes` more. An offloaded optimizer has no state on the GPU. With an
    offloaded optimizer, ZeRO-3 and FSDP2 also offload the gradients. Sources: arXiv 1910.02054, section 5; torch's
    fully_shard.
    """
    sharding = sharding_of(candidate)
    kept = layer_activation_bytes(job, candidate) * job.shape.num_layers
    kept += candidate.micro_batch * job.seq_length * job.shape.hidden_size * job.bytes_of_value
    kept += recomputed_bytes(job, candidate)
    if candidate.engine == "deepspeed":
        state = _deepspeed_state(job, candidate, kept)
    elif candidate.engine == "fsdp":
        state = _fsdp_state(job, candidate)
    elif candidate.engine == "megatron_fsdp":
        state = _megatron_fsdp_state(job, candidate)
    else:
        state = _ddp_state(job, candidate)
    weights, gradients, optimizer = state.weights + state.casts, state.gradients, state.optimizer
    if keeps_weight_casts(candidate):
        weights += weight_cast_bytes(job, job.block_parameters)
    if sharding.offload != "none":
        optimizer = 0.0
        gradients = gradients if sharding.zero_stage in (1, 2) else 0.0
    if sharding.offload == "all":
        weights = 0.0
    share = profile.allocator_share
    weights_come_and_go = state.casts or (state.gathered and candidate.engine == "deepspeed")
    if weights_come_and_go and profile.gather_allocator_share is not None:
        share = profile.gather_allocator_share
    return with_allocator(
        share,
        weights=weights + state.gathered,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept,
        logits=logit_bytes(job, candidate),
        buffers=state.buffers,
    )


def _deepspeed_state(job: Job, candidate: Candidate, activations: float) -> _State:
    """Return the state under DeepSpeed, given the bytes of all activations.

    ZeRO-0: 2 + g + 12. ZeRO-1: 2 + g + 12/n. ZeRO-2: 2 + (g + 12)/n. ZeRO-3: (2 + g + 12)/n, and a few gathered layers,
    or all of them if the weights stay gathered. Stages 1 to 3 also hold a bucket that is being reduced.

    ZeRO-1 with fp32 gradients of 16-bit values reduces them into a separate shard of g/n (stage_1_and_2.py, compact
    buffers). With one micro-batch, the other gradients appear only as the activations are freed.
    """
    sharding = sharding_of(candidate)
    stage, ranks, parameters = sharding.zero_stage, candidate.layout.world_size, job.num_parameters
    value, g = job.bytes_of_value, job.bytes_of_gradient
    weights = value * parameters / (ranks if stage == 3 else 1)
    gradients = g * parameters / (ranks if stage >= 2 else 1)
    gathered = buffers = 0.0
    if stage == 1 and g > value:
        accumulates = candidate.num_micro_batches(job) > 1
        gradients = (gradients if accumulates else max(0.0, gradients - activations)) + gradients / ranks
    if stage == 3:
        gathered = _gathered_weights(job, candidate)
        weights += value * parameters / sharding.hpz_size if sharding.hpz_size else 0.0
    if stage >= 1:
        buffers = 2 * g * min(REDUCE_BUCKET if stage == 3 else reduce_bucket(job.shape), parameters)
    optimizer = job.bytes_of_state * parameters / (ranks if stage >= 1 else 1)
    return _State(weights, gradients, optimizer, gathered=gathered, buffers=buffers)


def _fsdp_state(job: Job, candidate: Candidate) -> _State:
    """Return the state under FSDP2, with fp32 shards: (4 + g + 8)/n.

    FSDP2 also holds a few gathered layers, or all of them if the weights stay gathered. The embedding and the output
    layer stay gathered from forward to backward and are reduced one at a time. FSDP2 frees gathered weights at once and
    in order, which causes little fragmentation.
    """
    shards, parameters = sharding_of(candidate).shard_size or candidate.layout.world_size, job.num_parameters
    value, g = job.bytes_of_value, job.bytes_of_gradient
    return _State(
        weights=4 * parameters / shards,
        gradients=g * parameters / shards,
        optimizer=job.bytes_of_moments * parameters / shards,
        gathered=_gathered_weights(job, candidate),
        buffers=g * job.layer_parameters + (g + value) * job.embedding_parameters,
    )


def _megatron_fsdp_state(job: Job, candidate: Candidate) -> _State:
    """Return the state under Megatron-FSDP, with shards in both dtypes: (2 + 4 + g + 8)/n.

    With groups of s ranks: 2/s + g/s + (4 + 8)/n. Megatron-FSDP gathers more weights ahead than FSDP2, and queues
    gradients.
    """
    ranks, parameters, layer = candidate.layout.world_size, job.num_parameters, job.layer_parameters
    shards = sharding_of(candidate).shard_size or ranks
    value, g = job.bytes_of_value, job.bytes_of_gradient
    return _State(
        weights=(value / shards + 4 / ranks) * parameters,
        gradients=g * parameters / shards,
        optimizer=job.bytes_of_moments * parameters / ranks,
        gathered=value * (layer + max(2 * layer, _MEGATRON_PREFETCH) + _end_parameters(job)),
        buffers=g * min(max(2 * layer, _MEGATRON_QUEUE), parameters) + value * job.embedding_parameters,
    )


def _ddp_state(job: Job, candidate: Candidate) -> _State:
    """Return the state under DDP, with fp32 replicas and buckets: 4 + 4 + 8, and 2 for casts to 16 bits.

    Backward needs the cast of every matrix, unless full recomputation repeats the cast. fp8 layers have casts to fp8
    instead.
    """
    parameters, casts = job.num_parameters, 0.0
    if job.bytes_of_value < 4 and candidate.recompute != "full":
        casts = job.bytes_of_value * (parameters - job.fp8_share("forward") * job.block_parameters)
    return _State(4 * parameters, 4 * parameters, job.bytes_of_moments * parameters, casts=casts)


def _gathered_weights(job: Job, candidate: Candidate) -> float:
    """Return the bytes of the weights that ZeRO-3 or FSDP2 holds unsharded: of blocks, and of the rest of the model."""
    if sharding_of(candidate).keeps_weights:
        blocks, rest = job.block_parameters, job.num_parameters - job.block_parameters
    else:
        blocks, rest = _GATHERED_LAYERS * job.layer_parameters, _end_parameters(job)
    return gathered_bytes(job, candidate) * blocks + job.bytes_of_value * rest


def _end_parameters(job: Job) -> int:
    """Return the number of parameters of the embedding and the output layer."""
    return job.embedding_parameters * (1 if job.shape.tied_embeddings else 2)


def host_bytes(job: Job, candidate: Candidate, ranks_per_server: int) -> float:
    """Return the bytes that offload uses on each server: masters, moments, gradients and, with "all", the weights."""
    offload = sharding_of(candidate).offload
    if offload == "none":
        return 0.0
    each = job.bytes_of_state + job.bytes_of_gradient + (job.bytes_of_value if offload == "all" else 0)
    return each * job.num_parameters * ranks_per_server / candidate.layout.world_size
