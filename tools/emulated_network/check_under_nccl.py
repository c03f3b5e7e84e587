"""Compare all-reduces of two GPUs over the net plugin with its rate and latency, and check every result.

Each GPU is an emulated host. Exits with status 1 if a result is wrong. Run from the root of the repository:

    python -m tools.emulated_network.check_under_nccl --gb-per-s 6 12 25 50 --latency-us 10 40
"""

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

from megabench.runtime.emulated_network import EmulatedNetworkError
from megabench.runtime.shared_memory_network import SharedMemoryNetwork

SIZES = (2**10, 2**20, 2**26)  # bytes
NUM_CHECKED = 200
NUM_TIMED = 20
_SEED = 1


def model_seconds(num_bytes: int, gb_per_s: float, latency_us: float) -> float:
    """Return the time of a ring all-reduce between two hosts: two steps, each with half of the bytes."""
    return num_bytes / (gb_per_s * 1e9) + 2 * latency_us * 1e-6


def check(rank: int, device: torch.device, count: int) -> int:
    """Run all-reduces of drawn sizes. Return how many had a wrong result."""
    draw = torch.Generator().manual_seed(_SEED)
    num_wrong = 0
    for _ in range(count):
        size = int(2 ** (22 * torch.rand(1, generator=draw).item()))
        inputs = torch.randint(-(2**20), 2**20, (2, size), generator=draw, dtype=torch.int32)
        data = inputs[rank].clone().to(device)
        dist.all_reduce(data)
        num_wrong += not torch.equal(data.cpu(), inputs.sum(0, dtype=torch.int32))
    return num_wrong


def all_reduce_seconds(device: torch.device, num_bytes: int) -> float:
    """Return the median time of an all-reduce, in seconds."""
    data, times = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device), []
    for _ in range(3 + NUM_TIMED):
        dist.barrier()
        _synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(data)
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_rank(
    rank: int, variables: list[dict[str, str]], port: int, backend: str, gb_per_s: float, latency_us: int
) -> None:
    """Run as one of two ranks. Rank 0 prints a line per size."""
    os.environ |= variables[rank] | {"NCCL_HOSTID": f"emulated-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(minutes=2))
    num_wrong = check(rank, device, NUM_CHECKED)
    for size in SIZES:
        seconds, model = all_reduce_seconds(device, size), model_seconds(size, gb_per_s, latency_us)
        if rank == 0:
            print(
                f"{gb_per_s:8g} {latency_us:10} {size:12,} {seconds * 1e6:12,.1f} {model * 1e6:12,.1f} "
                f"{seconds / model:9.2f} {size / seconds / 1e9:9.2f} {num_wrong:6} of {NUM_CHECKED}",
                flush=True,
            )
    dist.destroy_process_group()
    if num_wrong:
        sys.exit(1)


def main(arguments: list[str] | None = None, backend: str = "nccl") -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb-per-s", type=float, nargs="+", default=[6.0, 12.0, 25.0, 50.0])
    parser.add_argument("--latency-us", type=int, nargs="+", default=[10, 40])
    given = parser.parse_args(arguments)
    if backend == "nccl" and torch.cuda.device_count() < 2:
        parser.error("two GPUs are needed, and fewer were found")
    print("    GB/s latency µs        bytes  measured µs     model µs     ratio  bus GB/s  wrong")
    for gb_per_s in given.gb_per_s:
        for latency_us in given.latency_us:
            try:
                with SharedMemoryNetwork(2, gb_per_s, latency_us) as network:
                    # the server of the store must outlive both ranks
                    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                    variables = [network.variables(host) for host in range(2)]
                    spawn(run_rank, (variables, store.port, backend, gb_per_s, latency_us), nprocs=2)
            except EmulatedNetworkError as error:
                parser.error(str(error))


if __name__ == "__main__":
    main()
