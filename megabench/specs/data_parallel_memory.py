"""GPU and host memory under DeepSpeed ZeRO 0 to 3, FSDP2 and DDP, in bytes. Loads no torch."""

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
from megabench.specs.sharding import REDUCE_BUCKET, gathered_bytes, reduce_bucket, sharding_of

# number of layers that ZeRO-3 and FSDP2 hold unsharded: one in use, one prefetched, one being reduced
_GATHERED_LAYERS = 3
# Numbers of parameters that Megatron-FSDP gathers ahead, and whose gradients it queues before it reduces them
# (megatron_fsdp.py: suggested_AG_prefetch_size, suggested_RS_queue_capacity)
_MEGATRON_PREFETCH, _MEGATRON_QUEUE = 500_000_000, 1_000_000_000


def data_parallel_memory(job: Job, candidate: Candidate, profile: Profile) -> Memory:
    """Return the memory of one rank of DeepSpeed, FSDP2, Megatron-FSDP or DDP.

    Bytes per parameter with AdamW, for n ranks and gradients of g bytes (megabench's engines):

    - ZeRO-0: 2 + g + 12. ZeRO-1: 2 + g + 12/n. ZeRO-2: 2 + (g + 12)/n. ZeRO-3: (2 + g + 12)/n. Stages 1 to 3 also hold
      a bucket that is being reduced.
    - ZeRO-1 with fp32 gradients of 16-bit values reduces them into a separate shard of g/n (stage_1_and_2.py, compact
      buffers). With one micro-batch, the other gradients appear only as the activations are freed.
    - FSDP2, with fp32 shards: (4 + g + 8)/n. The embedding and the output layer stay gathered from forward to backward
      and are reduced one at a time. FSDP2 frees gathered weights at once and in order, which causes little
      fragmentation.
    - Megatron-FSDP, with shards in both dtypes: (2 + 4 + g + 8)/n. With groups of s ranks, 2/s + g/s + (4 + 8)/n.
      Megatron-FSDP gathers more weights ahead than FSDP2, and queues gradients.
    - DDP, with fp32 replicas and buckets: 4 + 4 + 8, and 2 for the cast of every matrix that backward needs, unless
      full recomputation repeats the cast.
    - With fp8 products, engines that do not gather weights keep 2 for the casts of the matrices of blocks, in place of
      DDP's casts of them. FSDP2 gathers `gathered_bytes` per parameter of a block.

    ZeRO-3 and FSDP2 also hold a few gathered layers, or all of them if the weights stay gathered. Optimizers without
    AdamW's moments use 8 bytes per parameter less. An offloaded optimizer has no state on the GPU. With an offloaded
    optimizer, ZeRO-3 and FSDP2 also offload the gradients. Sources: arXiv 1910.02054, section 5; torch's fully_shard.
    """
    sharding = sharding_of(candidate)
    stage = sharding.zero_stage
    ranks, parameters, g = candidate.layout.world_size, job.num_parameters, job.bytes_of_gradient
    value, state, moments = job.bytes_of_value, job.bytes_of_state, job.bytes_of_moments
    layer = job.layer_parameters
    ends = job.embedding_parameters * (1 if job.shape.tied_embeddings else 2)
    kept = layer_activation_bytes(job, candidate) * job.shape.num_layers
    tokens = candidate.micro_batch * job.seq_length
    kept += tokens * job.shape.hidden_size * job.bytes_of_value
    kept += recomputed_bytes(job, candidate)
    whole = cast = buffers = 0.0
    if candidate.engine == "deepspeed":
        weights = value * parameters / (ranks if stage == 3 else 1)
        gradients = g * parameters / (ranks if stage >= 2 else 1)
        optimizer = state * parameters / (ranks if stage >= 1 else 1)
        if stage == 1 and g > value:
            accumulates = candidate.num_micro_batches(job) > 1
            gradients = (gradients if accumulates else max(0.0, gradients - kept)) + gradients / ranks
        if stage == 3:
            whole = value * (parameters if sharding.keeps_weights else _GATHERED_LAYERS * layer + ends)
            weights += value * parameters / sharding.hpz_size if sharding.hpz_size else 0.0
        if stage >= 1:
            buffers += 2 * g * min(REDUCE_BUCKET if stage == 3 else reduce_bucket(job.shape), parameters)
    elif candidate.engine == "fsdp":
        shards = sharding.shard_size or ranks
        weights, gradients = 4 * parameters / shards, g * parameters / shards
        optimizer = moments * parameters / shards
        whole = value * (parameters if sharding.keeps_weights else _GATHERED_LAYERS * layer + ends)
        num_gathered = job.shape.num_layers if sharding.keeps_weights else _GATHERED_LAYERS
        whole -= (value - gathered_bytes(job, candidate)) * num_gathered * layer
        buffers = g * layer + (g + value) * job.embedding_parameters
    elif candidate.engine == "megatron_fsdp":
        shards = sharding.shard_size or ranks
        weights, gradients = (value / shards + 4 / ranks) * parameters, g * parameters / shards
        optimizer = moments * parameters / ranks
        whole = value * (layer + max(2 * layer, _MEGATRON_PREFETCH) + ends)
        buffers = g * min(max(2 * layer, _MEGATRON_QUEUE), parameters) + value * job.embedding_parameters
    else:
        has_cast = value < 4 and candidate.recompute != "full"
        cast = value * (parameters - (job.block_parameters if job.has_fp8_products else 0)) if has_cast else 0.0
        weights, gradients, optimizer = 4 * parameters + cast, 4 * parameters, moments * parameters
    if stage < 3:
        weights += weight_cast_bytes(job, job.block_parameters)
    if sharding.offload != "none":
        optimizer = 0.0
        gradients = gradients if stage in (1, 2) else 0.0
    if sharding.offload == "all":
        weights = 0.0
    share = profile.allocator_share
    weights_come_and_go = cast or (whole and candidate.engine == "deepspeed")
    if weights_come_and_go and profile.gather_allocator_share is not None:
        share = profile.gather_allocator_share
    return with_allocator(
        share,
        weights=weights + whole,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept,
        logits=logit_bytes(job, candidate),
        buffers=buffers,
    )


def host_bytes(job: Job, candidate: Candidate, ranks_per_host: int) -> float:
    """Return the bytes that offload uses on each host: masters, moments, gradients and, with "all", the weights."""
    offload = sharding_of(candidate).offload
    if offload == "none":
        return 0.0
    each = job.bytes_of_state + job.bytes_of_gradient + (job.bytes_of_value if offload == "all" else 0)
    return each * job.num_parameters * ranks_per_host / candidate.layout.world_size
