"""Compute time of a GPU: matrix products, attention, element-wise operations and the optimizer. Loads no torch.

All times are for one rank and one micro-batch.
"""

from dataclasses import dataclass
from math import ceil

from megabench.cost.job import Job
from megabench.cost.profile import Profile

# sizes of the output tile of a thread block (CUTLASS, "Efficient GEMM"); large tiles reach the peak FLOP/s
_TILES = ((128, 256), (256, 128), (128, 128), (128, 64), (64, 64))
_TILE_SHARE = (1.0, 1.0, 0.92, 0.8, 0.6)
# number of kernels in a layer's forward pass, which is about half the number in its backward pass
_KERNELS_FORWARD = 22
_KERNELS_UNFUSED = 20  # additional kernels without fused norms, rotary embedding and activation
_LONG = 8192  # inner size of the calibration product, which has the full efficiency
_BACKWARD_ATTENTION = 2.5  # FLOPs of flash attention's backward pass ÷ forward pass (arXiv 2307.08691, section 3.1)


@dataclass(frozen=True)
class Machine:
    """A GPU in the cost model: its profile and its dense peak in FLOP/s."""

    profile: Profile
    peak: float


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and micro-batch. `backward` includes `weight_gradients`, and `forward` includes `attention`.

    `host_forward` and `host_backward` are the seconds that the host needs to launch the kernels, without collectives.
    """

    forward: float
    backward: float
    attention: float
    weight_gradients: float
    input_gradients: float
    host_forward: float
    host_backward: float


def gemm_seconds(machine: Machine, m: float, n: float, k: float) -> float:
    """Return the seconds of a 16-bit product [m, k] · [k, n], limited by peak FLOP/s or by memory bandwidth.

    Partly filled tiles, partly filled waves of thread blocks (NVIDIA's Matrix Multiplication Background guide) and a
    small inner size k reduce the efficiency.
    """
    profile = machine.profile
    fill = 0.0
    for (rows, columns), share in zip(_TILES, _TILE_SHARE, strict=True):
        down, across = ceil(m / rows), ceil(n / columns)
        waves = ceil(down * across / profile.num_sms)
        used = m * n / (waves * profile.num_sms * rows * columns)
        fill = max(fill, share * used)
    length = min(1.0, k / (k + profile.gemm_half_k) * (1 + profile.gemm_half_k / _LONG))
    rate = machine.peak * profile.gemm_efficiency * fill * length
    bytes_moved = 2 * (m * k + k * n + m * n)
    return max(2 * m * n * k / rate, bytes_moved / (profile.memory_gb_per_s * 1e9))


def memory_seconds(machine: Machine, num_bytes: float) -> float:
    """Return the seconds of element-wise work that reads and writes `num_bytes`."""
    return num_bytes / (machine.profile.memory_gb_per_s * 1e9)


def attention_seconds(machine: Machine, job: Job, tp: int, cp: int, micro_batch: int) -> tuple[float, float]:
    """Return the seconds of causal attention, forward and backward.

    Flash attention needs 2·S²·N·D FLOPs per sequence (half the square) in forward, and 2.5 × as many in backward.
    Without flash attention, batched products compute the full square, 4·S²·N·D, and softmax and dropout write and read
    the scores [B, N, S, S] (arXiv 2205.05198, figure 3).
    """
    shape, seq = job.shape, job.seq_length
    square = micro_batch * seq * seq / cp * shape.num_heads / tp
    profile = machine.profile
    if job.stack.flash_attention:
        has_chunks = cp > 1 and not job.exchanges_heads(tp, cp)
        is_version_2 = job.stack.flash_version_2 or (has_chunks and job.stack.chunks_by_flash_2)
        rate = machine.peak * (profile.flash_2_share if is_version_2 else 1.0)
        forward = 2 * square * shape.head_dim / rate
        return forward / profile.attention_forward, _BACKWARD_ATTENTION * forward / profile.attention_backward
    products = 4 * square * shape.head_dim / (machine.peak * profile.gemm_efficiency)
    # the inner size is head_dim, so reading and writing the scores limits these products
    products = max(products, memory_seconds(machine, 4 * square))
    # bytes per score: softmax 2 + 2, dropout 2 + 2 and 1 for the mask; backward moves the same bytes again
    passes = 4 + (5 if job.stack.dropout else 0)
    softmax = memory_seconds(machine, passes * square)
    return products + softmax, 2 * products + 1.5 * softmax


def elementwise_bytes(job: Job, tp: int, cp: int, micro_batch: int) -> float:
    """Return the bytes that a layer's fused element-wise operations read and write in the forward pass.

    Bytes per token in 16 bits, for M FFN matrices: norm and residual 2 · (4 + 6)·H, dropout 2 · 5·H, rotary embedding
    4·(N + K)·D/T, the norms of queries and keys (Qwen3) the same again, and the activation 2·M·F/T. Sequence
    parallelism divides the terms with H by T.
    """
    shape, tokens = job.shape, micro_batch * job.seq_length / cp
    cut = tp if job.stack.sequence_parallel else 1
    residual = (20 + (10 if job.stack.dropout else 0)) * shape.hidden_size / cut
    rotary = 4 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim / tp * (1 + shape.table.qk_norm)
    activation = 2 * job.ffn_matrices * shape.ffn_size / tp
    return tokens * (residual + rotary + activation) * job.bytes_of_value / 2


def kernels_forward(job: Job) -> int:
    """Return the number of kernels in a layer's forward pass. The backward pass has twice as many."""
    return _KERNELS_FORWARD + (0 if job.stack.fused else _KERNELS_UNFUSED)


def layer_seconds(machine: Machine, job: Job, tp: int, cp: int, micro_batch: int) -> LayerSeconds:
    """Return the seconds of a layer: matrix products, attention and element-wise operations."""
    shape, tokens = job.shape, micro_batch * job.seq_length / cp
    h, q, kv, f = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, 0
    f = shape.ffn_size
    products = (((q + 2 * kv) / tp, h), (h, q / tp), ((job.ffn_matrices - 1) * f / tp, h), (h, f / tp))
    forward = sum(gemm_seconds(machine, tokens, n, k) for n, k in products)
    inputs = sum(gemm_seconds(machine, tokens, k, n) for n, k in products)
    weights = sum(gemm_seconds(machine, n, k, tokens) for n, k in products)
    attention, attention_backward = attention_seconds(machine, job, tp, cp, micro_batch)
    traffic = elementwise_bytes(job, tp, cp, micro_batch)
    if not job.stack.fused:
        traffic *= machine.profile.unfused_traffic
    between = memory_seconds(machine, traffic)
    accumulate = memory_seconds(machine, accumulated_bytes(job) * job.layer_parameters / tp)
    host = kernels_forward(job) * machine.profile.launch_seconds
    return LayerSeconds(
        forward=forward + attention + between,
        backward=inputs + weights + attention_backward + 1.5 * between + accumulate,
        attention=attention,
        weight_gradients=weights,
        input_gradients=inputs,
        host_forward=host,
        host_backward=2 * host,
    )


def output_seconds(machine: Machine, job: Job, tp: int, cp: int, micro_batch: int) -> tuple[float, float]:
    """Return the seconds of the output layer and cross-entropy, forward and backward.

    The fused loss computes its gradients in forward (megabench/engines/common/cross_entropy.py). The fused loss reads
    or writes each 16-bit logit 6 times, and moves 18 bytes per element of the weight gradient, which is zeroed, summed,
    scaled and cast in fp32. Any other loss moves `loss_bytes` bytes per logit.
    """
    shape, tokens = job.shape, micro_batch * job.seq_length / cp
    rows = shape.vocab_size / tp
    forward = gemm_seconds(machine, tokens, rows, shape.hidden_size)
    backward = gemm_seconds(machine, tokens, shape.hidden_size, rows)
    backward += gemm_seconds(machine, rows, shape.hidden_size, tokens)
    elements, weights = tokens * rows, rows * shape.hidden_size
    accumulate = memory_seconds(machine, accumulated_bytes(job) * weights)
    if job.stack.fused_loss:
        return forward + backward + memory_seconds(machine, 12 * elements + 18 * weights), accumulate
    loss_forward, loss_backward = (memory_seconds(machine, size * elements) for size in job.stack.loss_bytes)
    return forward + loss_forward, backward + loss_backward + accumulate


def embedding_seconds(machine: Machine, job: Job, tp: int, cp: int, micro_batch: int) -> tuple[float, float]:
    """Return the seconds of the embedding: the lookup in forward, and the accumulation of gradients in backward."""
    tokens = micro_batch * job.seq_length / cp
    rows = tokens * job.shape.hidden_size * job.bytes_of_value
    added = accumulated_bytes(job) * job.embedding_parameters / tp
    return memory_seconds(machine, 2 * rows), memory_seconds(machine, 3 * rows + added)


def flattening_seconds(machine: Machine, job: Job, parameters: float) -> float:
    """Return the extra seconds of a sharded optimizer whose gradients are whole and reduced as one flat tensor.

    Gradients are read for the norm, read and written for clipping, and copied twice for the reduction (once by the
    program and once by torch). Gathered weights are copied three times (nanotron's optim/zero.py, distributed.py).
    """
    return memory_seconds(machine, (7 * job.bytes_of_gradient + 6 * job.bytes_of_value) * parameters)


def accumulated_bytes(job: Job) -> int:
    """Return the bytes per parameter for adding a gradient to its buffer.

    The buffer is read and written. The gradient is also written and read in 16 bits, unless its matrix product adds to
    the buffer.
    """
    return 2 * job.bytes_of_gradient + (0 if job.stack.fuses_weight_gradient else 4)


def optimizer_seconds(machine: Machine, job: Job, parameters: float, sharded: float) -> float:
    """Return the seconds of norm, clipping and AdamW of `sharded` parameters, and of zeroing all gradients.

    AdamW reads the gradient, the master weight and two moments, and writes the master weight, the moments and the
    weight: 28 + 2 bytes. The norm reads the gradient once more.
    """
    each = 28 + job.bytes_of_value + job.bytes_of_gradient
    return memory_seconds(machine, each * sharded + job.bytes_of_gradient * parameters)
