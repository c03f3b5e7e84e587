"""Measurements of fp8 on one device, with the products and casts of the engines."""

import statistics
from math import log
from typing import get_args

import torch

from megabench.calibrate.operations import layer_products, tensor_parallel_sizes
from megabench.calibrate.timers import Bench
from megabench.cost import compute
from megabench.cost.compute import GpuModel
from megabench.cost.job import Product
from megabench.cost.profile import Fp8Cost, Measurement, Profile
from megabench.engines.common.fp8 import product, quantize
from megabench.hardware.gpus import find_gpu
from megabench.models.shape import ModelShape
from megabench.parallel.layout import Layout
from megabench.precision import FP8_MULTIPLE
from megabench.runtime.device import DTYPES
from megabench.specs.fp8_check import odd_size

_HALF_K = range(0, 1001, 20)  # values that the fit tries

Timed = dict[Product, list[Measurement]]


def num_fp8_measurements(shape: ModelShape, device: str) -> int:
    """Return how many measurements `fp8_cost` takes, which is none if the GPU or the model does not support fp8."""
    gpu, sizes = find_gpu(device), _sizes(shape)
    return len(get_args(Product)) * len(sizes) + 1 if gpu and gpu.fp8_tflops and sizes else 0  # casts take one


def fp8_cost(bench: Bench, shape: ModelShape, tokens: int, profile: Profile, fp8_peak: float) -> Fp8Cost:
    """Measure and fit the cost of fp8 products. `fp8_peak` is the dense peak in FLOP/s."""
    tokens = max(1, tokens // FP8_MULTIPLE) * FP8_MULTIPLE
    # the bandwidth of finding the largest value of a tensor and casting it in both layouts, in GB/s
    tensor = bench.random(tokens, shape.ffn_size)
    num_bytes = compute.CAST * tensor.numel()
    cast_rate = num_bytes / bench.seconds("fp8 cast", lambda: quantize(tensor), bytes=num_bytes) / 1e9
    share = cast_rate / profile.memory_gb_per_s
    return fit_fp8_products(profile, fp8_peak, min(1.0, share), _fp8_products(bench, shape, tokens))


def _sizes(shape: ModelShape) -> list[tuple[int, int]]:
    """Return the output size and the inner size of each timed product, at the smallest and the largest tp for fp8."""
    tps = [tp for tp in tensor_parallel_sizes(shape) if not odd_size(shape, Layout(tp=tp), 1, FP8_MULTIPLE)]
    return [size for tp in sorted({*tps[:1], *tps[-1:]}) for size in layer_products(shape, tp)]


def _fp8_products(bench: Bench, shape: ModelShape, tokens: int) -> Timed:
    """Time the three products of each layer with the arguments of the engines (engines/common/fp8_linear.py)."""
    dtype = DTYPES[bench.precision]
    timed: Timed = {}
    for n, k in _sizes(shape):
        each: list[tuple[Product, tuple[int, int, int], torch.dtype, bool]] = [
            ("forward", (tokens, n, k), dtype, True),
            ("input_gradient", (tokens, k, n), dtype, False),
            ("weight_gradient", (n, k, tokens), torch.float32, False),
        ]
        for name, (rows, columns, inner), out, is_fast in each:
            left, right = (quantize(bench.random(size, inner), columns=False) for size in (rows, columns))
            bench.seconds(
                f"fp8 {name.replace('_', ' ')}",
                lambda left=left, right=right, out=out, is_fast=is_fast: product(  # type: ignore[misc]
                    left.rows, left.scale, right.rows, right.scale, out, is_fast
                ),
                m=rows,
                n=columns,
                k=inner,
            )
            timed.setdefault(name, []).append(bench.measurements[-1])
    return timed


def fit_fp8_products(profile: Profile, fp8_peak: float, cast_share: float, timed: Timed) -> Fp8Cost:
    """Fit the efficiency of each kind of product, and `half_k` for all of them, to the measured times."""

    def seconds(cost: Fp8Cost, name: Product, one: Measurement) -> float:
        # the peak in 16 bits does not matter to these products
        machine = GpuModel(profile.model_copy(update={"fp8": cost}), peak=fp8_peak, fp8_peak=fp8_peak)
        return compute.fp8_gemm_seconds(machine, name, one.sizes["m"], one.sizes["n"], one.sizes["k"])

    def fitted(half_k: float) -> Fp8Cost:
        full = Fp8Cost(forward=1, input_gradient=1, weight_gradient=1, half_k=half_k, cast_share=cast_share)
        found: dict[str, float] = {
            name: min(1.0, statistics.median(seconds(full, name, one) / one.seconds for one in measured))
            for name, measured in timed.items()
        }
        return full.model_copy(update=found)

    def loss(cost: Fp8Cost) -> float:
        return sum(
            abs(log(seconds(cost, name, one) / one.seconds)) for name, measured in timed.items() for one in measured
        )

    return min(map(fitted, _HALF_K), key=loss)
