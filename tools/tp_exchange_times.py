"""Time the products of a tensor-parallel MLP, forward and backward, by size and by the way of their exchange.

Run once per way on the GPUs of one NVLink domain, because the ways need different environment variables:

torchrun --nproc-per-node 2 tools/tp_exchange_times.py nccl
torchrun --nproc-per-node 2 tools/tp_exchange_times.py copy-engines

Each row of the output has one hidden size, and each column one number of tokens.
"""

import os
import sys
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabench.calibrate.timers import Bench
from megabench.engines.megatron.exchange import Exchange
from megabench.engines.megatron.linear import ColumnProduct, RowProduct, Way, exchange_of
from megabench.runtime.device import choose_device, initialize
from megabench.runtime.process import exit_process
from megabench.runtime.rendezvous import join

TOKENS = [1024 * 2**power for power in range(6)]
MLPS = {1024: 4096, 2048: 8192, 4096: 14336, 8192: 28672}  # hidden and FFN sizes


def main(way: Way) -> None:
    if way == "nccl":
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    place = join()
    device = initialize(place, place.rank, choose_device("auto", place.local_world_size))
    bench, exchange, size = Bench(device), exchange_of(dist.group.WORLD, way), place.world_size
    rows = [f"tp={size}, {way}, milliseconds", f"| hidden size | {' | '.join(f'{tokens:,}' for tokens in TOKENS)} |"]
    for hidden, ffn in MLPS.items():
        up, down = (weight(bench, *sizes) for sizes in ((2 * ffn // size, hidden), (hidden, ffn // size)))
        parts = [bench.random(tokens // size, 1, hidden).requires_grad_() for tokens in TOKENS]
        times = [bench.seconds("tp", partial(train, part, up, down, exchange)) for part in parts]
        rows.append(f"| {hidden:,} | {' | '.join(f'{1e3 * seconds:.2f}' for seconds in times)} |")
    if place.rank == 0:
        print("\n".join(rows))
    exit_process(0)


def weight(bench: Bench, num_rows: int, num_columns: int) -> nn.Parameter:
    """A weight with small values and the gradient buffer that megatron-core adds to a parameter."""
    values = nn.Parameter(0.02 * bench.random(num_rows, num_columns))
    values.main_grad = torch.zeros_like(values, dtype=torch.float32)  # type: ignore[attr-defined]
    return values


def train(part: Tensor, up: nn.Parameter, down: nn.Parameter, exchange: Exchange) -> None:
    """One forward and backward pass of both products, without an activation between them."""
    both = ColumnProduct.apply(part, up, exchange, False)
    output = RowProduct.apply(both[..., : down.shape[1]], down, exchange)
    output.backward(output.detach())
    part.grad = up.grad = down.grad = None


if __name__ == "__main__":
    main(cast(Way, sys.argv[1]))
