"""Compute time of a GPU: matrix products, attention, element-wise operations and the optimizer. Loads no torch.

All times are for one rank and one micro-batch.
"""

from dataclasses import dataclass
from math import ceil

from megabench.cost.job import FUSED_LOSS_CHUNK, Job, Product
from megabench.cost.profile import Profile
from megabench.optim.optimizers import OPTIMIZERS

# sizes of the output tile of a thread block (CUTLASS, "Efficient GEMM"); large tiles reach the peak FLOP/s
_TILES = ((128, 256), (256, 128), (128, 128), (128, 64), (64, 64))
_TILE_SHARE = (1.0, 1.0, 0.92, 0.8, 0.6)
# Host time of a layer's forward pass, in launches of a plain torch operation, and the additional time with fp8
# products. Most of it is Python code, and fused kernels do not shorten it (benchmarks/host-time).
_LAUNCHES_FORWARD, _LAUNCHES_FP8 = 85, 55
# Bytes per logit that a loss that is not fused reads and writes. Megatron-LM's fp32 loss (cross_entropy.py) needs, in
# forward: cast 2 + 4, maximum 4, sum 4, subtraction, exponential and division 4 + 4 each; in backward: scale 4 + 4,
# cast 4 + 2.
LOSS_BYTES = (38, 14)
# Bytes per element for casting a bf16 value to fp8: one kernel reads it to find the amax (the largest absolute value),
# and another one reads it and writes it in one or both layouts. A gathered fp8 value is transposed.
_FIND_AMAX, _READ_BF16, _READ_FP8, _WRITE_FP8 = 2, 2, 1, 1
_CAST_KNOWN_AMAX = _READ_BF16 + _WRITE_FP8  # in one layout
_CAST_ONE_LAYOUT = _FIND_AMAX + _CAST_KNOWN_AMAX
CAST = _CAST_ONE_LAYOUT + _WRITE_FP8
_TRANSPOSE = _READ_FP8 + _WRITE_FP8
_LONG = 8192  # inner size of the calibration product, which has the full efficiency
_ATTENTION_TILE = 128  # rows of queries of a thread block of flash attention
BACKWARD_ATTENTION = 2.5  # FLOPs of flash attention's backward pass ÷ forward pass (arXiv 2307.08691, section 3.1)


@dataclass(frozen=True)
class GpuModel:
    """A GPU in the cost model: its profile and its dense peak in FLOP/s, for 16-bit or fp32 products and for fp8."""

    profile: Profile
    peak: float
    fp8_peak: float | None = None


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


def gemm_seconds(machine: GpuModel, m: float, n: float, k: float) -> float:
    """Return the seconds of a 16-bit product [m, k] · [k, n], limited by peak FLOP/s or by memory bandwidth."""
    profile, bytes_moved = machine.profile, 2 * (m * k + k * n + m * n)
    return _gemm_seconds(machine, m, n, k, machine.peak * profile.gemm_efficiency, profile.gemm_half_k, bytes_moved)


def fp8_gemm_seconds(machine: GpuModel, product: Product, m: float, n: float, k: float) -> float:
    """Return the seconds of a product [m, k] · [k, n] of fp8 values, written in bf16, or in fp32 for weights."""
    cost = machine.profile.fp8
    assert cost and machine.fp8_peak
    bytes_moved = m * k + k * n + (4 if product == "weight_gradient" else 2) * m * n
    return _gemm_seconds(machine, m, n, k, machine.fp8_peak * cost.efficiency(product), cost.half_k, bytes_moved)


def _gemm_seconds(
    machine: GpuModel, m: float, n: float, k: float, long_rate: float, half_k: float, bytes_moved: float
) -> float:
    """Return the seconds of a product, given the FLOP/s of a long one.

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
    length = min(1.0, k / (k + half_k) * (1 + half_k / _LONG))
    rate = long_rate * fill * length
    return max(2 * m * n * k / rate, bytes_moved / (profile.memory_gb_per_s * 1e9))


def layer_product_seconds(machine: GpuModel, job: Job, product: Product, m: float, n: float, k: float) -> float:
    """Return the seconds of a product [m, k] · [k, n] of a linear layer of a block, as the mean over all blocks."""
    share, in_bf16 = job.fp8_share(product), gemm_seconds(machine, m, n, k)
    if not share:
        return in_bf16
    return share * fp8_gemm_seconds(machine, product, m, n, k) + (1 - share) * in_bf16


def memory_seconds(machine: GpuModel, num_bytes: float) -> float:
    """Return the seconds of element-wise work that reads and writes `num_bytes`."""
    return num_bytes / (machine.profile.memory_gb_per_s * 1e9)


def cast_seconds(machine: GpuModel, num_bytes: float) -> float:
    """Return the seconds of casts to fp8 that read and write `num_bytes`."""
    assert machine.profile.fp8
    return memory_seconds(machine, num_bytes) / machine.profile.fp8.cast_share


def weight_cast_seconds(machine: GpuModel, job: Job, parameters: float) -> float:
    """Return the seconds of one cast of the blocks' weights to fp8, or 0 if no matrix products are in fp8.

    Weights are cast in the layouts that are kept (memory.weight_cast_bytes).
    """
    if not job.has_fp8_products:
        return 0.0
    each = CAST if job.has_fp8_gradients and job.stack.keeps_transposed else _CAST_ONE_LAYOUT
    return cast_seconds(machine, job.fp8_share("forward") * each * parameters)


def repeated_weight_cast_seconds(machine: GpuModel, job: Job, parameters: float, forwards: int) -> float:
    """Return the seconds per micro-batch for casting weights of blocks to fp8 in each pass.

    Each forward pass casts the weights in one layout. The backward pass casts them in the other layout, with the amax
    that the forward pass found.
    """
    if not job.has_fp8_products:
        return 0.0
    backward = _CAST_KNOWN_AMAX if job.has_fp8_gradients else 0
    return cast_seconds(machine, job.fp8_share("forward") * (forwards * _CAST_ONE_LAYOUT + backward) * parameters)


def weight_transpose_seconds(machine: GpuModel, job: Job, parameters: float) -> float:
    """Return the seconds per micro-batch for transposing the fp8 weights of blocks in the backward pass."""
    return cast_seconds(machine, job.fp8_share("input_gradient") * _TRANSPOSE * parameters)


def activation_cast_bytes(job: Job, tp: int) -> tuple[float, float]:
    """Return the bytes per token for casting the inputs (forward) and the gradients (backward) of an fp8 layer.

    The inputs of the first product of attention and of the FFN, and the gradients of the second ones, have H elements
    and are cast before they are gathered: H/T elements in one layout, and H gathered elements are transposed in
    backward (engines/megatron/fp8_linear.py). All others are whole. Uncompiled blocks find three of the amaxes in
    SwiGLU's own kernels, which saves about 1% of a step and is not modelled. With bf16 gradients, only the inputs are
    cast to fp8, and no transposed copy is written.
    """
    shape = job.shape
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inputs = (q + shape.ffn_size) / tp
    gradients = (q + 2 * kv + (job.ffn_matrices - 1) * shape.ffn_size) / tp
    if not job.has_fp8_gradients:
        return _CAST_ONE_LAYOUT * (inputs + 2 * shape.hidden_size / tp), 0.0
    if tp == 1:
        return CAST * (inputs + 2 * shape.hidden_size), CAST * (gradients + 2 * shape.hidden_size)
    gathered = _CAST_ONE_LAYOUT * 2 * shape.hidden_size / tp
    return CAST * inputs + gathered, CAST * gradients + gathered + _TRANSPOSE * 4 * shape.hidden_size


def flash_work(num_sms: int, half_length: float, length: float, heads: float, head_dim: float) -> float:
    """Return the FLOPs that a causal flash attention call could compute in the time of its forward pass.

    `heads` counts the heads of all sequences. Half of the attention matrix has 2·S²·N·D FLOPs. Each thread block
    computes a tile of rows. Loading and storing the rows takes as long as `half_length` more keys. The longest thread
    blocks take twice as long as the mean. At the end of the call, processors are therefore idle for half of the longest
    block on average.
    """
    return 2 * (length + half_length) * (length * heads + _ATTENTION_TILE * num_sms) * head_dim


def attention_seconds(machine: GpuModel, job: Job, tp: int, cp: int, micro_batch: int) -> tuple[float, float]:
    """Return the seconds of causal attention, forward and backward.

    Flash attention needs 2.5 × as many FLOPs in backward as in forward. With context parallelism, each rank computes a
    part of the heads, or of the rows for all keys. Parts of the rows use FlashAttention-2, because torch supports them
    only there. Without flash attention, batched products compute the full square, 4·S²·N·D, and softmax writes and
    reads the scores [B, N, S, S] (arXiv 2205.05198, figure 3).
    """
    shape, profile, heads = job.shape, machine.profile, micro_batch * job.shape.num_heads / tp
    if job.stack.flash_attention:
        share = profile.flash_2_share if cp > 1 and not job.exchanges_heads(tp, cp) else 1.0
        work = flash_work(profile.num_sms, profile.attention_half_length, job.seq_length, heads / cp, shape.head_dim)
        long_seconds = work / (machine.peak * share)
        return long_seconds / profile.attention_forward, BACKWARD_ATTENTION * long_seconds / profile.attention_backward
    square = heads * job.seq_length**2 / cp
    products = 4 * square * shape.head_dim / (machine.peak * profile.gemm_efficiency)
    # the inner size is head_dim, so reading and writing the scores limits these products
    products = max(products, memory_seconds(machine, 4 * square))
    softmax = memory_seconds(machine, 4 * square)  # each attention score is written and read once, with 2 bytes
    return products + softmax, 2 * products + 1.5 * softmax


def elementwise_bytes(job: Job, tp: int, cp: int, micro_batch: int) -> float:
    """Return the bytes that a layer's fused element-wise operations read and write in the forward pass.

    Bytes per token in 16 bits, for M FFN matrices: norm and residual 2 · (4 + 6)·H/T with sequence parallelism, rotary
    embedding 4·(N + K)·D/T, the norms of queries and keys (Qwen3) the same again, and the activation 2·M·F/T.
    """
    shape, tokens = job.shape, micro_batch * job.seq_length / cp
    residual = 20 * shape.hidden_size / tp
    rotary = 4 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim / tp * (1 + shape.table.qk_norm)
    activation = 2 * job.ffn_matrices * shape.ffn_size / tp
    return tokens * (residual + rotary + activation) * job.bytes_of_value / 2


def layer_seconds(machine: GpuModel, job: Job, tp: int, cp: int, micro_batch: int) -> LayerSeconds:
    """Return the mean seconds of a layer: matrix products, attention and element-wise operations."""
    shape, tokens = job.shape, micro_batch * job.seq_length / cp
    h, q, kv, f = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, 0
    f = shape.ffn_size
    products = (((q + 2 * kv) / tp, h), (h, q / tp), ((job.ffn_matrices - 1) * f / tp, h), (h, f / tp))
    forward = sum(layer_product_seconds(machine, job, "forward", tokens, n, k) for n, k in products)
    inputs = sum(layer_product_seconds(machine, job, "input_gradient", tokens, k, n) for n, k in products)
    weights = sum(layer_product_seconds(machine, job, "weight_gradient", n, k, tokens) for n, k in products)
    attention, attention_backward = attention_seconds(machine, job, tp, cp, micro_batch)
    traffic = elementwise_bytes(job, tp, cp, micro_batch)
    if not job.stack.fused:
        traffic *= machine.profile.unfused_traffic
    between = memory_seconds(machine, traffic)
    added = accumulated_bytes(job, job.fp8_share("weight_gradient"))
    accumulate = memory_seconds(machine, added * job.layer_parameters / tp)
    casts_forward, casts_backward = 0.0, 0.0
    if fp8_share := job.fp8_share("forward"):
        casts_forward, casts_backward = (
            cast_seconds(machine, fp8_share * tokens * each) for each in activation_cast_bytes(job, tp)
        )
    host = (_LAUNCHES_FORWARD + fp8_share * _LAUNCHES_FP8) * machine.profile.launch_seconds
    return LayerSeconds(
        forward=forward + attention + between + casts_forward,
        backward=inputs + weights + attention_backward + 1.5 * between + accumulate + casts_backward,
        attention=attention,
        weight_gradients=weights,
        input_gradients=inputs,
        host_forward=host,
        host_backward=2 * host,
    )


def output_seconds(machine: GpuModel, job: Job, tp: int, cp: int, micro_batch: int) -> tuple[float, float]:
    """Return the seconds of the output layer and cross-entropy, forward and backward.

    The fused loss computes its gradients in forward (megabench/engines/common/cross_entropy.py). The fused loss reads
    or writes each 16-bit logit 6 times. The product of each chunk of tokens adds to the weight gradient, which it reads
    and writes. Without `adds_output_gradient`, this gradient is a temporary fp32 tensor, which is also zeroed and read,
    and written in 16 bits. The result is read and added to the gradient buffer. Any other loss moves `LOSS_BYTES` per
    logit.
    """
    shape, tokens = job.shape, micro_batch * job.seq_length / cp
    rows = shape.vocab_size / tp
    forward = gemm_seconds(machine, tokens, rows, shape.hidden_size)
    backward = gemm_seconds(machine, tokens, shape.hidden_size, rows)
    backward += gemm_seconds(machine, rows, shape.hidden_size, tokens)
    elements, weights = tokens * rows, rows * shape.hidden_size
    if job.stack.fused_loss:
        moved = 12 * elements + 8 * ceil(elements / FUSED_LOSS_CHUNK) * weights
        if job.adds_output_gradient:
            return forward + backward + memory_seconds(machine, moved), 0.0
        accumulate = memory_seconds(machine, (2 * job.bytes_of_gradient + 4) * weights)
        return forward + backward + memory_seconds(machine, moved + 8 * weights), accumulate
    accumulate = memory_seconds(machine, accumulated_bytes(job) * weights)
    loss_forward, loss_backward = (memory_seconds(machine, size * elements) for size in LOSS_BYTES)
    return forward + loss_forward, backward + loss_backward + accumulate


def embedding_seconds(machine: GpuModel, job: Job, tp: int, cp: int, micro_batch: int) -> tuple[float, float]:
    """Return the seconds of the embedding: the lookup in forward, and the accumulation of gradients in backward."""
    tokens = micro_batch * job.seq_length / cp
    rows = tokens * job.shape.hidden_size * job.bytes_of_value
    added = accumulated_bytes(job) * job.embedding_parameters / tp
    return memory_seconds(machine, 2 * rows), memory_seconds(machine, 3 * rows + added)


def accumulated_bytes(job: Job, fp8_share: float = 0.0) -> float:
    """Return the bytes per parameter for adding a gradient to its buffer.

    The buffer is read and written. The gradient is also written and read in 16 bits, unless its matrix product adds to
    the buffer. If an fp8 product does not add to the buffer, it writes its result in fp32, which is counted in the time
    of the product. The addition then reads the result, which is 4 bytes. `fp8_share` is the share of gradients that fp8
    products compute.
    """
    stack = job.stack
    added = (1 - fp8_share) * (not stack.fuses_weight_gradient) + fp8_share * (not stack.fuses_fp8_weight_gradient)
    return 2 * job.bytes_of_gradient + 4 * added


def optimizer_seconds(machine: GpuModel, job: Job, parameters: float, sharded: float) -> float:
    """Return the seconds of norm, clipping and update of `sharded` parameters, and of zeroing all gradients.

    AdamW reads the gradient, the master weight and two moments, and writes the master weight, the moments and the
    weight: 28 + 2 bytes. The norm reads the gradient once more. Muon also multiplies matrices, in 16 bits.
    """
    each = job.mean_bytes(OPTIMIZERS[job.optimizer].update_bytes) + job.bytes_of_value + job.bytes_of_gradient
    multiplying = job.shape.num_layers * sum(gemm_seconds(machine, *product) for product in job.update_products)
    return multiplying + memory_seconds(machine, each * sharded + job.bytes_of_gradient * parameters)
