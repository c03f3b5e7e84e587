"""Measurements of attention on one device, and the fit of its constants."""

import statistics
from collections.abc import Callable, Sequence
from math import log

import torch.nn.functional as F
from torch import Tensor, autograd

from megabench.calibrate.timers import Bench
from megabench.cost.compute import BACKWARD_ATTENTION, flash_work
from megabench.cost.profile import ATTENTION, Measurement, Profile
from megabench.models.shape import ModelShape

_SEQUENCES = (4, 2, 1)  # numbers of sequences that the tokens are divided into
_HALF_LENGTHS = range(0, 2001, 20)  # values that the fit tries
_PASSES = ("attention forward", "attention backward")

NUM_ATTENTION_MEASUREMENTS = len(_SEQUENCES) * len(_PASSES)


def attention(bench: Bench, shape: ModelShape, tokens: int) -> list[Measurement]:
    """Time causal attention of `tokens` tokens, as several sequences and as one.

    A matrix product runs before each pass, as in training: it brings the GPU to its power limit and replaces the values
    in the caches. Alone, attention takes about 10% less time on H100.
    """
    begun = len(bench.measurements)
    a, b = bench.random(tokens, shape.hidden_size), bench.random(2 * shape.ffn_size, shape.hidden_size)
    for sequences in _SEQUENCES:
        length = max(1, tokens // sequences)
        sizes = {"length": length, "heads": sequences * shape.num_heads, "head_dim": shape.head_dim}
        bench.seconds_in_turn(_passes(bench, shape, sequences, length), lambda: a @ b.t(), **sizes)
    return bench.measurements[begun:]


def _passes(bench: Bench, shape: ModelShape, sequences: int, length: int) -> dict[str, Callable[[], None]]:
    """Return the forward and the backward pass of causal attention, by the kind of their measurements."""
    # [B, N, S, D] in the memory order of the engines' products, which is [B, S, N, D]
    query, key, value, gradient = (
        bench.random(sequences, length, heads, shape.head_dim).transpose(1, 2).requires_grad_()
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    )
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs[:] = [F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)]

    def backward() -> None:
        autograd.grad(outputs[0], (query, key, value), gradient)

    return dict(zip(_PASSES, (forward, backward), strict=True))


def fit_attention(profile: Profile, peak: float, timed: Sequence[Measurement]) -> Profile:
    """Fit `attention_forward`, `attention_backward` and `attention_half_length` to the measured times."""

    def fractions(half_length: float, kind: str) -> list[float]:
        """Return the fraction of the peak that explains each time, given a half length."""
        return [
            flash_work(profile.num_sms, half_length, **one.sizes) / peak / one.seconds
            for one in timed
            if one.kind == kind
        ]

    def fitted(half_length: float) -> tuple[float, Profile]:
        constants, loss = [], 0.0
        for kind, flops in zip(_PASSES, (1.0, BACKWARD_ATTENTION), strict=True):
            each = [flops * fraction for fraction in fractions(half_length, kind)]
            constants.append(min(1.0, statistics.median(each)))
            # the backward pass takes about 2.5 times as long, and counts more
            loss += flops * sum(abs(log(fraction / constants[-1])) for fraction in each)
        found = (*constants, float(half_length))
        return loss, profile.model_copy(update=dict(zip(ATTENTION, found, strict=True)))

    longest = max(one.sizes["length"] for one in timed)
    return min((fitted(half) for half in _HALF_LENGTHS if half <= longest), key=lambda one: one[0])[1]
