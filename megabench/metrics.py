"""Definitions of tokens per second, FLOPs per token, MFU and step-time statistics. Loads no torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megabench.models.shape import ModelShape


@dataclass(frozen=True)
class FlopsPerToken:
    """Training FLOPs per token, with causal attention (half the square) and with the full square."""

    causal: float
    full: float


def flops_per_token(shape: ModelShape, seq_length: int) -> FlopsPerToken:
    """FLOPs per token are 6 × matrix parameters + attention. Recomputation is never counted as useful work.

    A matrix product costs 2 FLOPs per parameter in forward and 4 in backward. Attention scores and their product with
    the values cost 4·S·N·D FLOPs per token and layer in forward (full square), and three times as many in training.
    Source: arXiv 2204.02311 appendix B; the causal half as in current Megatron-LM.
    """
    matrices = 6.0 * shape.matrix_parameters
    square = 12.0 * shape.num_layers * seq_length * shape.num_heads * shape.head_dim
    return FlopsPerToken(causal=matrices + square / 2, full=matrices + square)


def output_layer_cost(shape: ModelShape, seq_length: int) -> float:
    """Return the cost of the output layer as a multiple of a layer: 2.1 for Llama-3-8B at sequence 8192."""
    output = 6.0 * shape.vocab_size * shape.hidden_size
    layers = flops_per_token(shape, seq_length).causal - output
    return output / (layers / shape.num_layers)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile by linear interpolation between order statistics, as numpy does by default."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Throughput:
    """The throughput of a run, from the median of its timed steps."""

    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    samples_per_second: float
    tflops_per_device_causal: float
    tflops_per_device_full: float
    days_per_100b_tokens: float

    def mfu(self, peak_tflops: float | None) -> float | None:
        """Return causal model FLOP/s ÷ dense peak of the precision in use; None when the peak is not known."""
        return self.tflops_per_device_causal / peak_tflops if peak_tflops else None


def throughput(
    step_seconds: Sequence[float], shape: ModelShape, seq_length: int, global_batch: int, num_devices: int
) -> Throughput | None:
    """Return the throughput of timed steps, given the seconds of the slowest rank, or None without timed steps."""
    if not step_seconds:
        return None
    seconds = statistics.median(step_seconds)
    tokens_per_second = global_batch * seq_length / seconds
    per_device = tokens_per_second / num_devices
    flops = flops_per_token(shape, seq_length)
    return Throughput(
        step_seconds=seconds,
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_device=per_device,
        samples_per_second=global_batch / seconds,
        tflops_per_device_causal=per_device * flops.causal / 1e12,
        tflops_per_device_full=per_device * flops.full / 1e12,
        days_per_100b_tokens=100e9 / tokens_per_second / 86400,
    )
