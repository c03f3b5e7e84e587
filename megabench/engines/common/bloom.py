"""BLOOM's attention and activation with torch's fused kernels.

transformers computes both without fusion: it stores all fp32 scores of a layer, and passes over the widest activations
ten times.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomGelu

from megabench.engines.common.kernels import BLOOM_CHANNELS


def alibi_attention(query: Tensor, key: Tensor, value: Tensor, alibi: Tensor) -> Tensor:
    """Compute causal attention with scores q·k / √D plus the `alibi` value of the key (arXiv 2108.12409).

    `query`, `key` and `value` are [B, heads, S, D], `alibi` [B, heads, S]; returns [B, heads, S, D]. The ALiBi values
    are passed in extra channels of q and k, because flash attention accepts no bias.
    """
    head_size = query.shape[-1]
    context = F.scaled_dot_product_attention(
        # √D cancels the division of the scores by √D; the keys are zero in all other extra channels
        F.pad(query, (0, BLOOM_CHANNELS), value=math.sqrt(head_size)),
        torch.cat([key, F.pad(alibi[..., None].to(key.dtype), (0, BLOOM_CHANNELS - 1))], dim=-1),
        F.pad(value, (0, BLOOM_CHANNELS)),
        is_causal=True,
        scale=head_size**-0.5,
    )
    return context[..., :head_size]


class FusedAttention(BloomAttention):
    """BLOOM's attention for training: whole sequences without padding, dropout or a cache."""

    def forward(self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, **_: Any) -> tuple[Tensor, None]:
        batch, length, _width = hidden_states.shape
        states = self.query_key_value(hidden_states).view(batch, length, self.num_heads, 3, self.head_dim)
        query, key, value = states.permute(3, 0, 2, 1, 4)
        context = alibi_attention(query, key, value, alibi.view(batch, self.num_heads, length))
        output: Tensor = self.dense(context.transpose(1, 2).reshape(batch, length, -1))
        return residual + output, None


class FusedGelu(BloomGelu):
    """Compute BLOOM's approximation of GELU in one pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


def fuse(model: PreTrainedModel) -> None:
    """Replace attention and activation of a transformers BLOOM model by fused kernels. Weights keep their names."""
    model.config._attn_implementation = "sdpa"  # fused attention needs no mask [B, 1, S, S]
    fused: dict[type[nn.Module], type[nn.Module]] = {BloomAttention: FusedAttention, BloomGelu: FusedGelu}
    for module in model.modules():
        if kind := fused.get(type(module)):
            module.__class__ = kind
