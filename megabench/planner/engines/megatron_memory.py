"""GPU memory under tensor, context and pipeline parallelism (the megatron engine), in bytes. Loads no torch."""

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from megabench.cost import schedule
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
from megabench.parallel.layout import Layout
from megabench.specs.megatron import copies_pay


@dataclass(frozen=True)
class MegatronVariant:
    """The sharding of the optimizer over the dp·cp replicas of a rank's weights.

    With a `shard_size`, only replicas among `shard_size` neighbouring ranks share the state.
    """

    shards_optimizer: bool = True
    shard_size: int | None = None

    def num_shards(self, layout: Layout) -> int:
        """Return the number of ranks that share the optimizer state of a rank's weights."""
        replicas = layout.data_parallel * layout.cp
        if not self.shards_optimizer:
            return 1
        return min(replicas, max(1, self.shard_size // layout.tp)) if self.shard_size else replicas

    def prefix(self, engine: str) -> str:
        return ""

    @property
    def words(self) -> list[str]:
        return [f"shard{self.shard_size}"] if self.shard_size else []

    @property
    def kind(self) -> bool:
        return self.shards_optimizer


def megatron_variant(candidate: Candidate) -> MegatronVariant:
    """Return `candidate.variant`. The candidate must be one of the megatron engine."""
    return cast(MegatronVariant, candidate.variant)


def in_flight(stage: int, num_stages: int, chunks: int, num_micro_batches: int) -> float:
    """Return the number of micro-batches whose activations a stage holds at once.

    With P stages and m micro-batches, 1F1B holds min(P − stage, m). The interleaved schedule with v chunks per stage
    holds 2·(P − stage − 1) + (v − 1)·P + 1 micro-batches of a chunk (arXiv 2104.04473, section 2.2), which are divided
    by v here. Its first stage holds 1 + (P − 1)/(P·v) times as many activations as with 1F1B.
    """
    if chunks == 1:
        return min(num_stages - stage, num_micro_batches)
    warm_up = 2 * (num_stages - stage - 1) + (chunks - 1) * num_stages + 1
    return min(warm_up, num_micro_batches * chunks) / chunks


@lru_cache(maxsize=65536)
def layers_in_flight(stage: int, num_stages: int, chunks: tuple[int, ...], num_micro_batches: int) -> float:
    """Return the number of pairs of a layer and a micro-batch whose activations a stage holds at once.

    `chunks` are the numbers of layers of the stage's model chunks. With unequal chunks, the number is the largest in
    the order of the schedule, which repeats after a few rounds of P micro-batches.
    """
    if len(set(chunks)) == 1:
        return sum(chunks) * in_flight(stage, num_stages, len(chunks), num_micro_batches)
    rounds = min(num_micro_batches // num_stages, 4)
    held = most = 0
    for is_forward, chunk, _ in schedule.order(stage, num_stages, len(chunks), rounds * num_stages):
        held += chunks[chunk] if is_forward else -chunks[chunk]
        most = max(most, held)
    return most


def megatron_memory(job: Job, candidate: Candidate, profile: Profile) -> Memory:
    """Return the memory of the pipeline stage that uses the most.

    The optimizer state may be sharded over the dp·cp replicas. With equal stages, the first stage holds the most
    activations, and the last stage holds the logits. The second stage has more layers than the first one if the first
    model chunk has none.
    """
    layers = [sum(chunks) for chunks in job.chunk_layers(candidate.layout)]
    last = candidate.layout.pp - 1
    fullest = {0, last} | ({1} if last and layers[1] > layers[0] else set())
    return max(
        (stage_memory(job, candidate, profile, stage) for stage in sorted(fullest)), key=lambda memory: memory.total
    )


def stage_parameters(job: Job, candidate: Candidate, stage: int) -> float:
    """Return the parameters of a rank on this stage.

    The parameters are those of the stage's layers, of the embedding on the first stage and of the output layer on the
    last, divided by tp.
    """
    layout, shape = candidate.layout, job.shape
    layers = stage_layers(job, candidate, stage)
    ends = (stage == 0) + (stage == layout.pp - 1)
    if shape.tied_embeddings and layout.pp == 1:
        ends = 1
    return (layers * job.layer_parameters + ends * job.embedding_parameters) / layout.tp


def stage_layers(job: Job, candidate: Candidate, stage: int) -> int:
    """Return the number of layers of a pipeline stage, summed over its model chunks."""
    return sum(job.chunk_layers(candidate.layout)[stage])


def copies_between_products(job: Job, tp: int, cp: int, micro_batch: int) -> bool:
    """Return whether copy engines exchange the activations of a layer, if its ranks share an NVLink domain."""
    if tp == 1 or job.stack.copies == "never" or job.stack.keeps_gathered:
        return False
    tokens = micro_batch * job.seq_length / cp
    return job.stack.copies == "always" or copies_pay(job.shape, tokens, tp, job.has_fp8_products)


def stage_memory(job: Job, candidate: Candidate, profile: Profile, stage: int) -> Memory:
    """Return the memory of a rank on one stage."""
    layout = candidate.layout
    parameters = stage_parameters(job, candidate, stage)
    shards = megatron_variant(candidate).num_shards(layout)
    layers = stage_layers(job, candidate, stage)
    kept = layer_activation_bytes(job, candidate)
    num_micro_batches, chunks = candidate.num_micro_batches(job), job.chunk_layers(layout)[stage]
    micro_batches = in_flight(stage, layout.pp, layout.vp, num_micro_batches)
    activations = kept * layers_in_flight(stage, layout.pp, chunks, num_micro_batches)
    tokens = candidate.micro_batch * job.seq_length / layout.cp
    hidden = tokens * job.shape.hidden_size * job.bytes_of_value
    activations += hidden / layout.tp * micro_batches * (stage == 0)
    activations += recomputed_bytes(job, candidate)
    # The gathered sequence of a layer's matrix products, the buffers of copy engines (for two exchanges each way), and
    # the tensors received from neighbouring stages. The buffers are included even if a TP group spans several
    # hosts, which exchange by NCCL: no such layout is fast.
    copies = copies_between_products(job, layout.tp, layout.cp, candidate.micro_batch)
    buffers = (2 + 4 * copies) * hidden * (layout.tp > 1) + 2 * hidden / layout.tp * (layout.pp > 1)
    return with_allocator(
        profile.allocator_share,
        weights=job.bytes_of_value * parameters + weight_cast_bytes(job, layers * job.layer_parameters / layout.tp),
        gradients=job.bytes_of_gradient * parameters,
        optimizer=job.bytes_of_state * parameters / shards,
        activations=activations,
        logits=logit_bytes(job, candidate) if stage == layout.pp - 1 else 0.0,
        buffers=buffers,
    )
