"""The frequencies of the rotary embedding, without transformers, whose import takes longer than a small run."""

import math

import torch
from torch import Tensor

from megabench.models.shape import ModelShape


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """θ^(−2i/D) for i in 0 … D/2 − 1 (arXiv 2104.09864), scaled or not: fp32 on CPU, [D/2].

    Llama 3.1's scaling leaves wave lengths alone that went often enough into the original context, divides the
    frequency of those that did not by its factor, and blends in between (modeling_rope_utils.py of transformers).
    """
    assert shape.rope_theta is not None
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    if not (scaling := shape.rope_scaling):
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0, 1))
