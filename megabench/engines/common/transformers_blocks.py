"""The modules of transformers models, and the fused kernels that replace parts of them."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomGelu

from megabench.config import ResolvedConfig
from megabench.engines.common.cross_entropy import linear_cross_entropy
from megabench.engines.common.fp8_linear import use_fp8
from megabench.engines.common.kernels import (
    BLOOM_CHANNELS,
    fuses_bloom,
    fuses_cross_entropy,
    fuses_norms,
    swiglu_finds_amax,
)
from megabench.engines.common.norm import norm_of_sum, rms_norm
from megabench.engines.common.swiglu import swiglu


class LossHead(nn.Linear):
    """An output layer fused with the loss: hidden states [B, S, H] -> the mean cross-entropy of `labels` [B, S].

    The model calls this layer like any output layer, so that sharding engines gather its weight.
    """

    labels: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.flatten(0, 1), self.weight, self.labels.flatten())


class Fp8SwiGLUMLP(nn.Module):
    """The MLP of a block with SwiGLU and fp8 products, [B, S, H] -> [B, S, H], whose linear layers know their amaxes.

    `fuse` turns the MLPs of transformers and of Liger into this class.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden), finds_amax=True))
        return output


class FusedNorm(nn.Module):
    """The RMSNorm of a transformers model, [..., H] -> [..., H]. `fuse` turns the model's norms into this class.

    The module also computes the addition, because ZeRO-3 and FSDP2 gather its weight only when the module is called.
    """

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden: Tensor, added: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the RMSNorm of `hidden`; or, if `added` is given, hidden + added and the RMSNorm of this sum."""
        if added is None:
            return rms_norm(hidden, self.weight, self.variance_epsilon)
        return norm_of_sum(hidden, added, self.weight, self.variance_epsilon)


class _FusedBlock:
    """A block of a transformers model, [B, S, H] -> [B, S, H], with a fused residual addition and RMSNorm."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states, normed = self.post_attention_layernorm(hidden_states, attended)
        output: Tensor = self.mlp(normed)
        return hidden_states + output


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


class FusedBloomAttention(BloomAttention):
    """BLOOM's attention for training: whole sequences without padding, dropout or a cache."""

    def forward(self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, **_: Any) -> tuple[Tensor, None]:
        batch, length, _width = hidden_states.shape
        states = self.query_key_value(hidden_states).view(batch, length, self.num_heads, 3, self.head_dim)
        query, key, value = states.permute(3, 0, 2, 1, 4)
        context = alibi_attention(query, key, value, alibi.view(batch, self.num_heads, length))
        output: Tensor = self.dense(context.transpose(1, 2).reshape(batch, length, -1))
        return residual + output, None


class FusedBloomGelu(BloomGelu):
    """Compute BLOOM's approximation of GELU in one pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


def blocks(model: PreTrainedModel, run: ResolvedConfig) -> list[nn.Module]:
    """Return the layers of a model, in order."""
    return list(model.get_submodule(run.shape.table.layer_prefix.rstrip(".")).children())


def fuse(model: PreTrainedModel, run: ResolvedConfig) -> None:
    """Install the fused loss, fp8 products and the model family's kernels, before an engine wraps the modules."""
    if fuses_cross_entropy(run):
        head = model.get_output_embeddings()
        assert type(head) is nn.Linear and head.bias is None
        head.__class__ = LossHead  # tied weights share one name
    if fuses_bloom(run):
        _fuse_bloom(model)
    if fuses_norms(run):
        layers = blocks(model, run)
        norm, layer = type(layers[0].input_layernorm), type(layers[0])
        fused_layer = type(f"Fused{layer.__name__}", (_FusedBlock, layer), {})
        for module in model.modules():
            if type(module) is norm:
                module.__class__ = FusedNorm
            elif type(module) is layer:
                module.__class__ = fused_layer
    for number in run.fp8_layers:
        block = blocks(model, run)[number]
        use_fp8(
            block,
            keeps_casts=not run.spec.gathers_weights(run.options),
            has_bf16_gradients=run.fp8_recipe == "bf16-gradients",
            keeps_transposed=run.options.get("keep_transposed", True),
        )
        if swiglu_finds_amax(run):
            block.mlp.__class__ = Fp8SwiGLUMLP


def _fuse_bloom(model: PreTrainedModel) -> None:
    """Replace attention and activation of a BLOOM model by fused kernels. Weights keep their names.

    transformers stores all fp32 scores of a layer, and passes over the widest activations ten times.
    """
    model.config._attn_implementation = "sdpa"  # fused attention needs no mask [B, 1, S, S]
    fused: dict[type[nn.Module], type[nn.Module]] = {BloomAttention: FusedBloomAttention, BloomGelu: FusedBloomGelu}
    for module in model.modules():
        if kind := fused.get(type(module)):
            module.__class__ = kind
