"""Definitions of tokens per second, FLOPs per token, MFU, quantiles and the metrics of a step. Loads no torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megabench.models.shape import ModelShape

DEFAULT_TOKENS = 100e9  # of the training runs whose days are shown


@dataclass(frozen=True)
class FlopsPerToken:
    """Training FLOPs per token, forward and backward.

    `causal` counts half of the S×S attention matrix, and `full` counts the whole S×S attention matrix.
    """

    causal: float
    full: float


def flops_per_token(shape: ModelShape, seq_length: int) -> FlopsPerToken:
    """Return 6 × matrix parameters + attention FLOPs. Recomputation does not count.

    A matrix product costs 2 FLOPs per parameter in forward and 4 FLOPs per parameter in backward. Attention scores and
    their product with the values cost 4·S·N·D FLOPs per token and layer in forward (full S×S matrix). Forward and
    backward together cost three times the FLOPs of forward.
    Source: arXiv 2204.02311 appendix B. The causal count follows current Megatron-LM.
    """
    matrices = 6.0 * shape.matrix_parameters
    square = 12.0 * shape.num_layers * seq_length * shape.num_heads * shape.head_dim
    return FlopsPerToken(causal=matrices + square / 2, full=matrices + square)


def output_layer_cost(shape: ModelShape, seq_length: int) -> float:
    """Return output-layer FLOPs ÷ transformer-layer FLOPs, which is 2.1 for Llama-3-8B at sequence length 8192."""
    output = 6.0 * shape.vocab_size * shape.hidden_size
    layers = flops_per_token(shape, seq_length).causal - output
    return output / (layers / shape.num_layers)


def training_days(tokens_per_second: float, num_tokens: float = DEFAULT_TOKENS) -> float:
    """Return the days of an uninterrupted training run."""
    return num_tokens / tokens_per_second / 86400


def token_words(num_tokens: float) -> str:
    """Return a number of tokens as text: "100 billion tokens"."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if num_tokens >= unit:
            return f"{num_tokens / unit:,.10g} {name} tokens"
    return f"{num_tokens:,.0f} tokens"


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile by linear interpolation between order statistics (the default of `numpy.quantile`)."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Throughput:
    """Throughput of a run, computed from the median of the timed steps."""

    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    samples_per_second: float
    tflops_per_device_causal: float
    tflops_per_device_full: float
    days_per_100b_tokens: float

    def mfu(self, peak_tflops: float | None) -> float | None:
        """Return causal model FLOP/s ÷ dense peak FLOP/s of the training precision, or None if the peak is unknown."""
        return self.tflops_per_device_causal / peak_tflops if peak_tflops else None


def throughput(
    step_seconds: Sequence[float], shape: ModelShape, seq_length: int, global_batch: int, num_devices: int
) -> Throughput | None:
    """Return the throughput, or None if `step_seconds` is empty.

    `step_seconds` contains the slowest rank's seconds of each timed step.
    """
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
        days_per_100b_tokens=training_days(tokens_per_second),
    )


def step_metrics(
    loss: float | None,
    grad_norm: float | None,
    learning_rate: float | None,
    peak_memory_gib: float | None,
    gpu_utilization: float | None,
) -> dict[str, float | None]:
    """Return the metrics of any step by their TensorBoard tags. A value is None if it is not known."""
    return {
        "train/loss": loss,
        "train/grad_norm": grad_norm,
        "train/learning_rate": learning_rate,
        "usage/peak_reserved_gib": peak_memory_gib,
        "usage/gpu_utilization": gpu_utilization,
    }


def speed_metrics(
    seconds: float, tokens_per_second: float, world_size: int, tflops_per_device: float, mfu: float | None
) -> dict[str, float | None]:
    """Return the metrics of a step that depend on its time, by their TensorBoard tags."""
    return {
        "throughput/step_seconds": seconds,
        "throughput/tokens_per_second": tokens_per_second,
        "throughput/tokens_per_second_per_device": tokens_per_second / world_size,
        "throughput/tflops_per_device": tflops_per_device,
        "throughput/mfu": mfu,
    }


# the tags of the metrics of every run
BUILT_IN_METRICS = {*step_metrics(None, None, None, None, None), *speed_metrics(1.0, 0.0, 1, 0.0, None)}
