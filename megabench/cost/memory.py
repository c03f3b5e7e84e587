"""Peak memory of a GPU in bytes, by part. Loads no torch."""

from dataclasses import dataclass, replace
from statistics import NormalDist

from megabench.cost.job import FUSED_LOSS_CHUNK, Candidate, Job

# Measured peak memory ÷ predicted peak memory. The mean is that of the 160 GPU trials of the studies in benchmarks/,
# without gpt2-zero, fp8-engines and the faults that benchmarks/NOTES.md describes. Their standard deviation is 0.044.
# The larger one also holds for 1,171 published runs of another program: of the layouts with a chance of 80 to 95%, 94%
# ran.
_MEASURED_SHARE = NormalDist(1.022, 0.08)
LIKELY = 0.95  # the least chance of a layout that counts as fitting
MAY_FIT = 1.1  # predicted peak memory ÷ available memory up to which a layout may fit


@dataclass(frozen=True)
class Memory:
    """The bytes of the rank that uses the most memory.

    `allocator` is the memory that torch's allocator reserves but does not use.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    allocator: float

    @property
    def total(self) -> float:
        held = self.weights + self.gradients + self.optimizer
        return held + self.activations + self.logits + self.buffers + self.allocator


def fit_chance(predicted_bytes: float, available_bytes: float) -> float:
    """Return the chance that a layout with this predicted peak memory fits into the available memory, from 0 to 1."""
    return _MEASURED_SHARE.cdf(available_bytes / predicted_bytes)


def likely_bytes(available_bytes: float) -> float:
    """Return the predicted peak memory up to which a layout is likely to fit into the available memory."""
    return available_bytes / _MEASURED_SHARE.inv_cdf(LIKELY)


def layer_activation_bytes(job: Job, candidate: Candidate) -> float:
    """Return the mean activation bytes that a layer keeps for backward, per micro-batch and rank.

    Flash attention and sequence parallelism need (8·H + 4·N·D + 4·K·D + 2·M·F)/T bytes per token, for M FFN matrices,
    and 4·N/T for the softmax statistics. 8·H are the 16-bit inputs and outputs of two norms, and every rank stores half
    of them whole with kept gathered inputs. Scores without flash attention need 2·N·S/T. Recomputed layers keep only
    their input, 2·H/T (arXiv 2205.05198, sections 4 and 5). Norms that are not fused keep 8·H/T for fp32 values.
    Context parallelism that exchanges heads keeps the attention output before and after the exchange.

    Linear layers with fp8 gradients save their inputs in fp8, 1 byte per element. The inputs that norms and activations
    computed are saved only by these layers, so 2·H + F bytes less are kept. Attention keeps its 16-bit output for its
    own backward, so N·D more bytes are kept. Layers with bf16 gradients save their inputs in bf16.
    """
    shape, layout, stack, fp8_share = job.shape, candidate.layout, job.stack, job.fp8_share("weight_gradient")
    tokens = candidate.micro_batch * job.seq_length / layout.cp
    wide = job.bytes_of_value / 2
    if candidate.recompute == "full":
        return tokens * wide * 2 * shape.hidden_size / layout.tp
    per_head = shape.head_dim * (4 * shape.num_heads + 4 * shape.num_kv_heads)
    values = 8 * shape.hidden_size / layout.tp
    values += (per_head + 2 * job.ffn_matrices * shape.ffn_size) / layout.tp
    if job.exchanges_heads(layout.tp, layout.cp):
        values += 2 * shape.num_heads * shape.head_dim / layout.tp
    if stack.keeps_gathered:
        values += 4 * shape.hidden_size * (1 - 1 / layout.tp) * (1 - fp8_share / 2)
    values += fp8_share * (shape.num_heads * shape.head_dim - shape.ffn_size - 2 * shape.hidden_size) / layout.tp
    if not stack.fused:
        values += 8 * shape.hidden_size / layout.tp
    scores = 0.0
    if stack.flash_attention:
        values += 4 * shape.num_heads / layout.tp
    elif candidate.recompute == "none":
        scores = 2 * shape.num_heads * job.seq_length / layout.tp
    return tokens * wide * (values + scores)


def weight_cast_bytes(job: Job, parameters: float) -> float:
    """Return the bytes of the fp8 casts of weights of blocks, or 0 without fp8.

    The casts are kept in both layouts, or in one layout if only the forward pass uses them or if the backward pass
    transposes them.
    """
    return job.fp8_share("forward") * (2 if job.has_fp8_gradients and job.stack.keeps_transposed else 1) * parameters


def recomputed_bytes(job: Job, candidate: Candidate) -> float:
    """Return the activation bytes of the layer that is being recomputed, under full recomputation."""
    if candidate.recompute != "full":
        return 0.0
    return layer_activation_bytes(job, replace(candidate, recompute="none"))


def logit_bytes(job: Job, candidate: Candidate) -> float:
    """Return the bytes of the logits [B·S, V/T] and of cross-entropy on the last stage.

    Without the fused loss, fp32 logits exist twice: as values, and as softmax, which becomes the gradient. The 16-bit
    logits are freed before the softmax. The fused loss stores one chunk of bf16 logits, which their gradient
    overwrites. Without `adds_output_gradient`, it also stores the gradient of the output layer's weight in fp32 and in
    16 bits.
    """
    tokens = candidate.micro_batch * job.seq_length / candidate.layout.cp
    rows = job.shape.vocab_size / candidate.layout.tp
    if job.stack.fused_loss:
        chunk = min(tokens * rows, FUSED_LOSS_CHUNK)
        return 2 * chunk + (0 if job.adds_output_gradient else 4 + 2) * rows * job.shape.hidden_size
    return 8 * tokens * rows


def with_allocator(share: float, **parts: float) -> Memory:
    """Return the memory of the parts in bytes, with the allocator's unused memory as a share of the temporary parts.

    Fragmentation grows with temporary memory, not with weights, gradients and optimizer state.
    """
    comes_and_goes = parts["activations"] + parts["logits"] + parts["buffers"]
    return Memory(**parts, allocator=share * comes_and_goes)
