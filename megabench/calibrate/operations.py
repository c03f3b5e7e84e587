"""Measurements on one device: matrix products, element-wise operations, launches and copies to the host."""

import statistics
from collections.abc import Sequence

import torch

from megabench.calibrate.timers import Bench
from megabench.cost import compute
from megabench.cost.compute import GpuModel
from megabench.cost.fitting import descend
from megabench.cost.profile import Measurement, Profile
from megabench.hardware.gpus import find_gpu
from megabench.hardware.topology import Topology
from megabench.models.shape import ModelShape
from megabench.runtime.device import device_name

_COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}
_TINY_OPERATIONS = 200


def num_device_measurements(shape: ModelShape) -> int:
    """Return how many measurements the functions of this module take together."""
    # each of the four operations that are not matrix products needs one measurement
    return 5 * len(tensor_parallel_sizes(shape)) + 4


def memory_rate(bench: Bench) -> float:
    """Return the memory bandwidth of an element-wise sum in GB/s: two tensors are read and one is written."""
    count = _COPY_BYTES[bench.device.type] // 2 // (4 if bench.precision == "fp32" else 2)
    a, b = bench.random(count), bench.random(count)
    out = torch.empty_like(a)
    seconds = bench.seconds("element-wise", lambda: torch.add(a, b, out=out), bytes=3 * a.nbytes)
    return 3 * a.nbytes / seconds / 1e9


def tensor_parallel_sizes(shape: ModelShape) -> list[int]:
    """Return the tensor-parallel sizes whose matrix products are timed."""
    return [tp for tp in (1, 2, 4, 8) if shape.num_kv_heads % tp == 0 and shape.ffn_size % tp == 0]


def layer_products(shape: ModelShape, tp: int) -> list[tuple[int, int]]:
    """Return output and inner size of the matrix products of a layer's forward pass on a tensor-parallel rank."""
    h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return [((q + 2 * kv) // tp, h), (h, q // tp), (2 * shape.ffn_size // tp, h), (h, shape.ffn_size // tp)]


def products(bench: Bench, shape: ModelShape, tokens: int) -> list[Measurement]:
    """Time the matrix products of a layer and of the output layer.

    Each tp of 1, 2, 4 and 8 that divides the number of KV heads and the FFN size is timed.
    """
    begun = len(bench.measurements)
    for tp in tensor_parallel_sizes(shape):
        for n, k in [*layer_products(shape, tp), (shape.vocab_size // tp, shape.hidden_size)]:
            a, b = bench.random(tokens, k), bench.random(n, k)
            bench.seconds("product", lambda a=a, b=b: a @ b.t(), m=tokens, n=n, k=k, tp=tp)  # type: ignore[misc]
    return bench.measurements[begun:]


def peak(base: Profile, device: torch.device, bench: Bench, products: Sequence[Measurement]) -> float:
    """Return the dense peak FLOP/s from the catalogue of GPUs, or from the fastest product if the GPU is unknown."""
    gpu = find_gpu(device_name(device))
    if gpu and (tflops := gpu.peak_tflops(bench.precision)):
        return tflops * 1e12
    return max(2 * one.sizes["m"] * one.sizes["n"] * one.sizes["k"] / one.seconds for one in products)


def fit_products(profile: Profile, peak: float, products: Sequence[Measurement]) -> Profile:
    """Fit `gemm_efficiency` and `gemm_half_k` to the measured times of the matrix products."""

    def loss(candidate: Profile) -> float:
        machine = GpuModel(candidate, peak)
        ratios = [
            compute.gemm_seconds(machine, one.sizes["m"], one.sizes["n"], one.sizes["k"]) / one.seconds
            for one in products
        ]
        return statistics.mean(max(ratio, 1 / ratio) - 1 for ratio in ratios)

    return descend(profile, ("gemm_efficiency", "gemm_half_k"), loss)


def launch(bench: Bench) -> float:
    """Return the host time per kernel launch in seconds, measured with tiny kernels in forward and backward."""
    start = bench.random(8).requires_grad_()

    def chain() -> None:
        value = start
        for _ in range(_TINY_OPERATIONS):
            value = value * 1.0001
        value.sum().backward()

    return bench.seconds("kernel launches", chain, kernels=2 * _TINY_OPERATIONS) / (2 * _TINY_OPERATIONS)


def host_copy(bench: Bench) -> float:
    """Return the bandwidth from device to pinned host memory in GB/s. On CPU, time a memory copy."""
    count = _COPY_BYTES[bench.device.type] // 8
    here = torch.zeros(count, device=bench.device)
    there = torch.zeros(count, pin_memory=bench.device.type == "cuda")
    seconds = bench.seconds("host copy", lambda: there.copy_(here, non_blocking=True), bytes=here.nbytes)
    return here.nbytes / seconds / 1e9


def dram_rate(bench: Bench, topology: Topology) -> float:
    """Return the total bandwidth of host memory that all ranks of a server achieve together, in GB/s."""
    a = torch.zeros(_COPY_BYTES[bench.device.type] // 4)
    seconds = bench.seconds("host memory", lambda: a.mul_(1.0), bytes=2 * a.nbytes)
    return 2 * a.nbytes * topology.ranks_per_server / seconds / 1e9
