"""Time the products of a tensor-parallel MLP, forward and backward, by size and by the way of their exchange.

Run once per way on the GPUs of one NVLink domain, because the ways need different environment variables:

torchrun --nproc-per-node 2 tools/tp_exchange_times.py nccl
torchrun --nproc-per-node 2 tools/tp_exchange_times.py copy-engines

Each row has one hidden size, and each column one number of tokens. A time is the mean of up to 40 repetitions.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabench.engines.megatron.exchange import Collectives, Exchange
from megabench.engines.megatron.linear import ColumnProduct, RowProduct
from megabench.runtime.process import exit_process

TOKENS = [1024 * 2**power for power in range(6)]
MLPS = {1024: 4096, 2048: 8192, 4096: 14336, 8192: 28672}  # hidden and FFN sizes
WARMUP, MOST_REPETITIONS, LEAST_REPETITIONS, ELEMENTS_REPEATED_ONCE = 3, 40, 8, 2**31


def main(way: str) -> None:
    if way == "nccl":
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    exchange = exchange_by(way)
    size = dist.get_world_size()
    say(f"tp={size}, {way}, milliseconds\n| hidden size | " + " | ".join(f"{tokens:,}" for tokens in TOKENS) + " |")
    for hidden, ffn in MLPS.items():
        up, down = weight(2 * ffn // size, hidden), weight(hidden, ffn // size)
        times = [milliseconds(tokens // size, up, down, exchange) for tokens in TOKENS]
        say(f"| {hidden:,} | " + " | ".join(f"{time:.2f}" for time in times) + " |")
    torch.cuda.synchronize()
    exit_process(0)


def exchange_by(way: str) -> Exchange:
    group = dist.group.WORLD
    assert group is not None
    if way == "nccl":
        return Collectives(group)
    from megabench.engines.megatron.copy_engines import copy_engines

    return copy_engines(group)


def weight(rows: int, columns: int) -> nn.Parameter:
    values = nn.Parameter(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02)
    values.main_grad = torch.zeros_like(values, dtype=torch.float32)  # type: ignore[attr-defined]
    return values


def milliseconds(num_rows: int, up: nn.Parameter, down: nn.Parameter, exchange: Exchange) -> float:
    hidden = torch.randn(num_rows, 1, up.shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    repetitions = ELEMENTS_REPEATED_ONCE // (num_rows * dist.get_world_size() * up.shape[1])
    repetitions = min(max(repetitions, LEAST_REPETITIONS), MOST_REPETITIONS)
    for _ in range(WARMUP):
        train(hidden, up, down, exchange)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(repetitions):
        train(hidden, up, down, exchange)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repetitions


def train(hidden: Tensor, up: nn.Parameter, down: nn.Parameter, exchange: Exchange) -> None:
    """One forward and backward pass of both products, without an activation between them."""
    both = ColumnProduct.apply(hidden, up, exchange, False)
    output = RowProduct.apply(both[..., : down.shape[1]], down, exchange)
    output.backward(output.detach())
    hidden.grad = up.grad = down.grad = None


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
