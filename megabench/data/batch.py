"""Batch, and which sequences each data-parallel rank reads at each step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.data.source import TokenSource


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank: packed sequences without padding.

    `tokens` is int64 [B, S+1]; the loss counts all S labels.
    """

    tokens: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same micro-batch on `device`."""
        # a copy from memory that is not pinned makes the host wait for the GPU
        tokens = self.tokens.pin_memory() if device.type == "cuda" else self.tokens
        return Batch(tokens.to(device, non_blocking=True))

    @property
    def inputs(self) -> Tensor:
        """int64 [B, S], a view."""
        return self.tokens[:, :-1]

    @property
    def labels(self) -> Tensor:
        """int64 [B, S], a view: the token that follows each input."""
        return self.tokens[:, 1:]


def micro_batches(source: TokenSource, config: ResolvedConfig, dp_rank: int, step: int) -> list[Batch]:
    """The micro-batches of data-parallel rank `dp_rank` at step `step` (counted from 0).

    Step k takes the sequences k·G to (k+1)·G - 1, G being the global batch, whatever the layout: micro-batch m of
    rank r takes B of them from k·G + (m·dp + r)·B on.
    """
    return [
        Batch(torch.stack([source.sequence(first + offset) for offset in range(config.micro_batch)]))
        for first in range(
            step * config.global_batch + dp_rank * config.micro_batch,
            (step + 1) * config.global_batch,
            config.layout.data_parallel * config.micro_batch,
        )
    ]
