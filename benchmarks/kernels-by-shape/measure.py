"""Time causal attention and matrix products by shape on one GPU, and write one JSON line per measurement.

Usage: python benchmarks/kernels-by-shape/measure.py OUT.jsonl. All times are in seconds.

- "attention": the attention kernel that torch selects. `alone` and `alone_backward` repeat attention without other
  work; `forward` and `backward` run between matrix products as in training. `product` is the time of one such product.
- "attention kernel": cuDNN and FlashAttention-2, each between matrix products.
- "product": the products of a layer in bf16 and fp8. `fp8` is without casts. Its `*_fast_bf16` entries are the backward
  products with fast accumulation and bf16 results.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megabench.engines.common.fp8 import product, quantize

DEVICE, BF16, FP32 = torch.device("cuda", 0), torch.bfloat16, torch.float32

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
KERNEL_LENGTHS = (1024, 2048, 4096, 8192, 16384)
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

# tokens, and the output and input size of each linear layer (QKV, projection, FC1, FC2)
LAYERS = {
    "llama3-8b": (8192, [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]),
    "llama3-8b cp2": (4096, [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]),
    "llama3-70b tp4 cp2": (4096, [(2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168)]),
    "llama3-70b tp4": (8192, [(2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168)]),
    "llama3-405b tp8 cp2": (4096, [(2304, 16384), (16384, 2048), (13312, 16384), (16384, 6656)]),
    "gpt3-175b tp4": (2048, [(9216, 12288), (12288, 3072), (12288, 12288), (12288, 12288)]),
    "llama2-7b": (4096, [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)]),
}


class Shape(NamedTuple):
    """The shape of one attention call."""

    length: int
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int


class Passes(NamedTuple):
    """Attention as functions: a forward pass without gradients, a forward pass, and the backward pass of the latter."""

    inference: Callable[[], object]
    forward: Callable[[], object]
    backward: Callable[[], object]


def attention_shapes() -> list[Shape]:
    """Return the shapes of the "attention" measurements."""
    shapes = [
        Shape(length, tokens // length, 32, 8, 128)
        for length in LENGTHS
        for tokens in ((8192, 16384) if length <= 8192 else (length,))
    ]
    # few heads, as under tensor parallelism
    shapes += [Shape(2048, 1, heads, heads // 4, 128) for heads in (32, 8, 4)]
    shapes += [Shape(4096, 1, heads, heads // 4, 128) for heads in (32, 8, 4)]
    shapes += [Shape(8192, 1, heads, heads // 4, 128) for heads in (8, 4)]
    shapes += [Shape(2048, sequences, 24, 24, 128) for sequences in (1, 4)]
    shapes += [Shape(4096, sequences, 16, 8, 128) for sequences in (8, 4)]
    shapes += [Shape(2048, 4, heads, heads, 64) for heads in (8, 16)]
    return [*shapes, Shape(4096, 2, 32, 32, 128)]


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device=DEVICE, dtype=BF16)


def timed(operation: Callable[[], object], target_seconds: float = 0.2) -> float:
    """Return the seconds of one operation: the median of three loops of `target_seconds` each."""

    def loop(times: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            operation()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    loop(1)
    times = max(3, int(target_seconds / max(loop(1), 1e-6)))
    return statistics.median(loop(times) for _ in range(3))


def in_turn(parts: Sequence[Callable[[], object]], rounds: int, untimed: int) -> list[float]:
    """Return the median seconds of each part if all parts run in turn, without the first `untimed` rounds."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)] for _ in range(rounds)]
    for row in events:
        row[0].record()
        for part, event in zip(parts, row[1:], strict=True):
            part()
            event.record()
    torch.cuda.synchronize()
    kept = events[untimed:]
    return [statistics.median(row[i].elapsed_time(row[i + 1]) / 1e3 for row in kept) for i in range(len(parts))]


def passes(shape: Shape) -> Passes:
    """Return the passes of causal attention on random inputs."""
    length, sequences, heads, kv_heads, head_dim = shape
    # [B, N, S, D] in the memory order of the engines' products, which is [B, S, N, D]
    query, key, value, gradient = (
        random(sequences, length, each, head_dim).transpose(1, 2) for each in (heads, kv_heads, kv_heads, heads)
    )
    inputs = [each.requires_grad_() for each in (query, key, value)]
    outputs: list[Tensor] = []

    def attention() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)

    def inference() -> None:
        with torch.no_grad():
            attention()

    def forward() -> None:
        outputs[:] = [attention()]

    def backward() -> None:
        torch.autograd.grad(outputs[0], inputs, gradient)

    return Passes(inference, forward, backward)


def attention(shape: Shape) -> dict[str, object]:
    """Time attention alone and between matrix products."""
    x, weight = random(8192, 4096), random(14336, 4096)
    inference, forward, backward = passes(shape)

    def three_products() -> list[Tensor]:
        return [x @ weight.t() for _ in range(3)]

    def both() -> None:
        forward()
        backward()

    alone, alone_both = timed(inference), timed(both)
    rounds = max(6, int(0.4 / (alone_both + 3 * 1.4e-3)))
    products, first, _, second = in_turn([three_products, forward, three_products, backward], rounds, rounds // 3)
    times = {"alone": alone, "alone_backward": alone_both - alone, "forward": first, "backward": second}
    return {"kind": "attention", **shape._asdict(), **times, "product": products / 3}


def attention_kernel(shape: Shape, kernel: str) -> dict[str, object]:
    """Time one attention kernel between matrix products."""
    x, weight = random(8192, 4096), random(28672, 4096)
    _, forward, backward = passes(shape)
    one_product = partial(torch.mm, x, weight.t())
    expected = 0.006 + 6e-16 * shape.sequences * shape.length**2 * shape.heads * shape.head_dim * 7
    rounds = max(8, int(0.3 / expected))
    with sdpa_kernel(KERNELS[kernel]):
        _, first, _, second = in_turn([one_product, forward, one_product, backward], rounds, rounds // 2)
    return {"kind": "attention kernel", "kernel": kernel, **shape._asdict(), "forward": first, "backward": second}


def layer_products(model: str, m: int, n: int, k: int) -> dict[str, object]:
    """Time the forward pass, the input gradient and the weight gradient of a linear layer, in bf16 and fp8."""
    x, weight, gradient = random(m, k), random(n, k), random(m, n)
    bf16 = {
        "forward": timed(partial(torch.mm, x, weight.t())),
        "input_gradient": timed(partial(torch.mm, gradient, weight)),
        "weight_gradient": timed(partial(torch.mm, gradient.t(), x)),
    }
    fp8 = {}
    for name, (rows, columns, inner), dtype, is_fast in (
        ("forward", (m, n, k), BF16, True),
        ("input_gradient", (m, k, n), BF16, False),
        ("weight_gradient", (n, k, m), FP32, False),
    ):
        left, right = (quantize(random(size, inner), columns=False) for size in (rows, columns))
        multiply = partial(product, left.rows, left.scale, right.rows, right.scale)
        fp8[name] = timed(partial(multiply, dtype, is_fast))
        if name != "forward":
            fp8[f"{name}_fast_bf16"] = timed(partial(multiply, BF16, True))
    return {"kind": "product", "model": model, "m": m, "n": n, "k": k, **bf16, "fp8": fp8}


def write(file: TextIO, record: dict[str, object]) -> None:
    line = json.dumps(record)
    print(line, flush=True)
    file.write(line + "\n")
    file.flush()


def main(path: str) -> None:
    torch.cuda.set_device(DEVICE)
    name, cudnn = torch.cuda.get_device_name(DEVICE), torch.backends.cudnn.version()
    with open(path, "w", encoding="utf-8") as file:
        write(file, {"kind": "device", "name": name, "torch": torch.__version__, "cudnn": cudnn})
        for shape in attention_shapes():
            write(file, attention(shape))
        for model, (tokens, layers) in LAYERS.items():
            for n, k in layers:
                write(file, layer_products(model, tokens, n, k))
        for head_dim in (128, 64):
            for length in KERNEL_LENGTHS:
                shape = Shape(length, max(1, 8192 // length), 32, 32, head_dim)
                for kernel in KERNELS:
                    write(file, attention_kernel(shape, kernel))


if __name__ == "__main__":
    main(sys.argv[1])
