"""Run a parallel model one part at a time, to compare models that do not fit into memory.

Sizes: Symbols: B micro-batch, S sequence length, H hidden size, V vocabulary size.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.engines.megatron.model import (
    ParallelLlama,
    create_process_groups,
    load_weights,
    transformer_config,
)
from megabench.models.weights import Weights


class Parts:
    """The parallel model of a run's layout for forward passes. Only one part exists at a time.

    Stages send their hidden states explicitly, without megatron-core's pipeline schedule.
    """

    def __init__(self, weights: Weights, run: ResolvedConfig) -> None:
        self._weights = weights
        self.groups = create_process_groups(run.layout)
        model_parallel_cuda_manual_seed(run.seed)  # megatron-core builds no layer without this part
        self._run = run.model_copy(update={"pp": 1})
        self._config = transformer_config(self._run)
        self._layer: ParallelLlama | None = None

    def _part(self, layers: range, has_embedding: bool = False, has_output: bool = False) -> ParallelLlama:
        part = ParallelLlama(self._config, self._run, self.groups, layers, has_embedding, has_output).eval()
        load_weights(part, self._weights, self._run, self.groups.tp.rank())
        return part

    def empty(self, tokens: Tensor) -> Tensor:
        """Return an empty buffer for hidden states, [S/tp, B, H]."""
        return torch.empty(tokens.shape[1] // self.groups.tp.size(), tokens.shape[0], self._run.shape.hidden_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [S/tp, B, H]."""
        hidden: Tensor = self._part(range(0), has_embedding=True).embedding(input_ids=tokens, position_ids=None)
        return hidden

    def layer(self, number: int, hidden: Tensor) -> Tensor:
        """[S/tp, B, H] -> the same."""
        if self._layer is None:
            self._layer = self._part(range(number, number + 1))
        elif self._layer.layers[0] != number:
            self._layer.layers = range(number, number + 1)
            load_weights(self._layer, self._weights, self._run, self.groups.tp.rank())
        return self._through(self._layer, hidden)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, S, V] of hidden states [S/tp, B, H], on every tensor-parallel rank."""
        self._layer = None
        mine = self._through(self._part(range(0), has_output=True), hidden)
        parts = [torch.empty_like(mine) for _ in range(self.groups.tp.size())]
        dist.all_gather(parts, mine.contiguous(), group=self.groups.tp)
        return torch.cat(parts, dim=-1)[..., : self._run.shape.vocab_size]

    @staticmethod
    def _through(part: ParallelLlama, hidden: Tensor) -> Tensor:
        part.set_input_tensor(hidden)
        return part(input_ids=None, position_ids=None, attention_mask=None, labels=None)
