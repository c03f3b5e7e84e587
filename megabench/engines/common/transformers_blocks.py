"""The modules of transformers models, and the fused kernels that replace parts of them."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from megabench.config import ResolvedConfig
from megabench.engines.common.cross_entropy import linear_cross_entropy
from megabench.engines.common.fp8_linear import use_fp8
from megabench.engines.common.kernels import fuses_bloom, fuses_cross_entropy, fuses_norms, swiglu_finds_amax
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


def blocks(model: PreTrainedModel, run: ResolvedConfig) -> list[nn.Module]:
    """Its layers, in order."""
    return list(model.get_submodule(run.shape.table.layer_prefix.rstrip(".")).children())


def fuse(model: PreTrainedModel, run: ResolvedConfig) -> None:
    """Install the fused loss, fp8 products and the model family's kernels, before an engine wraps the modules."""
    if fuses_cross_entropy(run):
        head = model.get_output_embeddings()
        assert type(head) is nn.Linear and head.bias is None
        head.__class__ = LossHead  # tied weights share one name
    if fuses_bloom(run):
        from megabench.engines.common import bloom

        bloom.fuse(model)
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
