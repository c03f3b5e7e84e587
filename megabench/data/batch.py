"""Micro-batches, and the assignment of sequences to data-parallel ranks and steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.data import DataError
from megabench.data.source import TokenSource


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank, with B packed sequences without padding.

    `tokens` is int64 [B, S+1], and the loss is computed over all S labels of each sequence.
    """

    tokens: Tensor

    def to(self, device: torch.device) -> "Batch":
        """Copy the micro-batch to `device`."""
        # copying from pageable memory would block the host until the GPU has finished
        tokens = self.tokens.pin_memory() if device.type == "cuda" else self.tokens
        return Batch(tokens.to(device, non_blocking=True))

    @property
    def inputs(self) -> Tensor:
        """The input tokens, int64 [B, S], as a view of `tokens`."""
        return self.tokens[:, :-1]

    @property
    def labels(self) -> Tensor:
        """The token that follows each input token, int64 [B, S], as a view of `tokens`."""
        return self.tokens[:, 1:]


def micro_batches(source: TokenSource, config: ResolvedConfig, dp_rank: int, step: int) -> list[Batch]:
    """Return the micro-batches of data-parallel rank `dp_rank` at step `step` (counted from 0).

    With a global batch of G sequences, step k uses sequences k·G to (k+1)·G - 1 under any layout. Micro-batch m of
    data-parallel rank r uses the B sequences that start at k·G + (m·dp + r)·B.

    Raises:
        DataError: A token is outside the vocabulary of the model.
    """
    return [
        Batch(torch.stack([_checked(source, first + offset, config) for offset in range(config.micro_batch)]))
        for first in range(
            step * config.global_batch + dp_rank * config.micro_batch,
            (step + 1) * config.global_batch,
            config.layout.data_parallel * config.micro_batch,
        )
    ]


def _checked(source: TokenSource, index: int, config: ResolvedConfig) -> Tensor:
    """Return sequence `index`. A tensor-parallel embedding would not notice a token outside the vocabulary."""
    tokens = source.sequence(index)
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < config.shape.vocab_size:
            raise DataError(
                f"data={config.data} contains token {token} in {source.place(index)}, but {config.model} has a "
                f"vocabulary of {config.shape.vocab_size} tokens. Do not change a token file during training, and use "
                f"the same file on every host."
            )
    return tokens
