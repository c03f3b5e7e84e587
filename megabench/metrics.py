"""Tokens per second, FLOPs per token, MFU, step-time statistics: the definitions, in one place. Loads no torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megabench.models.shape import ModelShape


@dataclass(frozen=True)
class FlopsPerToken:
    """Training FLOPs of one token (forward and backward): causal attention (half the square), and the full square."""

    causal: float
    full: float


def flops_per_token(shape: ModelShape, seq_length: int) -> FlopsPerToken:
    """6 × matrix parameters + attention; recomputation is never counted as useful work.

    A matrix product costs 2 FLOPs a parameter forward and 4 backward. Scores and their product with the values are
    4·S·N·D FLOPs a token and layer forward (full square), three times that in training.
    Source: arXiv 2204.02311 appendix B; the causal half as in current Megatron-LM.
    """
    matrices = 6.0 * shape.matrix_parameters
    square = 12.0 * shape.num_layers * seq_length * shape.num_heads * shape.head_dim
    return FlopsPerToken(causal=matrices + square / 2, full=matrices + square)


def output_layer_cost(shape: ModelShape, seq_length: int) -> float:
    """What the output layer computes, in layers: 2.1 for Llama-3-8B at sequence 8192."""
    output = 6.0 * shape.vocab_size * shape.hidden_size
    layers = flops_per_token(shape, seq_length).causal - output
    return output / (layers / shape.num_layers)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics (numpy's default rule)."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Throughput:
    """What a run achieved, from the median of its timed steps."""

    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    samples_per_second: float
    tflops_per_device_causal: float
    tflops_per_device_full: float
    days_per_100b_tokens: float

    def mfu(self, peak_tflops: float | None) -> float | None:
        """Causal model FLOP/s ÷ dense peak of the precision in use; None when the peak is not known."""
        return self.tflops_per_device_causal / peak_tflops if peak_tflops else None


def throughput(
    step_seconds: Sequence[float], shape: ModelShape, seq_length: int, global_batch: int, num_devices: int
) -> Throughput | None:
    """Throughput of the timed steps in `step_seconds` (slowest rank of each); None when no step was timed."""
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
