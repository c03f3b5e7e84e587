"""Frequencies of the rotary embedding, computed without transformers because its import is slower than a small run."""

import math

import torch
from torch import Tensor

from megabench.models.shape import ModelShape


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """Return θ^(−2i/D) for i in 0 … D/2 − 1 (arXiv 2104.09864), with scaling if any: fp32 on CPU, [D/2].

    Llama 3.1's scaling keeps high frequencies, which have many periods within the original context, and divides low
    frequencies by `factor`. It interpolates between these two ranges (modeling_rope_utils.py of transformers).
    """
    assert shape.rope_theta is not None
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    if not (scaling := shape.rope_scaling):
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0, 1))
