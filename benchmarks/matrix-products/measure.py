"""Matrix products at the shapes of Llama-3-8B on one GPU: at once, and when it has come to its power limit.

Each of a layer's four, its input's gradient, and its weight's gradient, summed up in fp32 or written in bf16.
"""

import subprocess
from collections.abc import Callable
from functools import partial

import torch

SECONDS = 0.6  # of a product, of which the second half is timed
HIDDEN, QKV, FFN = 4096, 6144, 14336
QUERY = ["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]


def timed(product: Callable[[], object], times: int) -> tuple[float, str]:
    """Milliseconds of one of `times` products, and the last clock and power that were seen beside them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        product()
    end.record()
    seen = ""
    while not end.query():
        seen = subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout.strip()
    return start.elapsed_time(end) / times, seen


def measure(name: str, product: Callable[[], object], flops: float) -> None:
    for _ in range(3):
        product()
    torch.cuda.synchronize()
    short, _ = timed(product, 2)
    half = max(3, int(SECONDS * 500 / short))
    timed(product, half)
    long, seen = timed(product, half)
    rates = f"short {flops / short / 1e9:6.0f}  sustained {flops / long / 1e9:6.0f} TFLOP/s"
    print(f"{name:34s} {rates}  {long:7.3f} ms  {seen}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    for tokens, tp in ((16384, 1), (16384, 4), (32768, 1)):
        sizes = {"qkv": (QKV // tp, HIDDEN), "proj": (HIDDEN, HIDDEN // tp), "fc1": (2 * FFN // tp, HIDDEN)}
        for name, (n, k) in (sizes | {"fc2": (HIDDEN, FFN // tp)}).items():
            inputs = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
            grads = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) * 0.01
            total, new = torch.zeros(n, k, device="cuda"), torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
            products: dict[str, Callable[[], object]] = {
                "fwd": partial(torch.mm, inputs, weight.t()),
                "dgrad": partial(torch.mm, grads, weight),
                "wgrad fp32": partial(torch.addmm, total, grads.t(), inputs, out_dtype=torch.float32, out=total),
                "wgrad bf16": partial(torch.mm, grads.t(), inputs, out=new),
            }
            for kind, product in products.items():
                measure(f"{tokens} tp{tp} {name} {kind}", product, 2.0 * tokens * n * k)


if __name__ == "__main__":
    main()
