"""Parallel Llama blocks for megatron-core's GPTModel: norm, attention, MLP, and their specs.

Sizes: Symbols: B micro-batch, S sequence length of this rank (divided by context parallelism), N heads and K KV heads
of this rank, D head dim, H hidden size, F FFN size of this rank.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right

from megabench.config import ResolvedConfig
from megabench.engines.common.kernels import fused, fuses_blocks
from megabench.engines.common.norm import norm_of_sum, rms_norm
from megabench.engines.common.swiglu import swiglu
from megabench.engines.megatron.fp8_linear import Fp8ColumnLinear, Fp8RowLinear
from megabench.engines.megatron.linear import ColumnLinear, RowLinear
from megabench.runtime.megatron_core import mlp_spec
from megabench.specs.megatron import MegatronSettings, tp_overlap


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) over the last dimension, on a part of the sequence or of the heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Each rank has the gradient of a part of the sequence. megatron-core sums the gradients over tp only if the
        # parameter has this attribute.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


class FusedNorm(RMSNorm):
    """RMSNorm with megabench's kernels, alone or after an addition.

    The module also computes the addition, because megatron-core gathers its weight only when the module is called.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, added: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the RMSNorm of `hidden_states`; or, if `added` is given, the sum of both and its RMSNorm."""
        if added is None:
            return rms_norm(hidden_states, self.weight, self.eps)
        return norm_of_sum(hidden_states, added, self.weight, self.eps)


class LlamaLayer(TransformerLayer):
    """megatron-core's TransformerLayer with a fused residual addition and RMSNorm. It supports only training."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **unsupported: Any
    ) -> tuple[Tensor, None]:
        """[S/tp, B, H], and angles [S, 1, 1, D] -> [S/tp, B, H]."""
        assert all(value is None for value in unsupported.values()), unsupported
        attended, _ = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        hidden_states, normed = self.pre_mlp_layernorm(hidden_states, attended)
        output, _ = self.mlp(normed)
        return hidden_states + output, None


class SwiGLU(MegatronModule):
    """An activation of gate and up in one tensor, with the interface of Transformer Engine's activations."""

    finds_amax = False

    def forward(self, both: Tensor) -> Tensor:
        """[S, B, 2F] -> [S, B, F]."""
        return swiglu(both, finds_amax=self.finds_amax)


class Fp8SwiGLU(SwiGLU):
    """SwiGLU between linear layers with fp8 products."""

    finds_amax = True


class RotaryAttention(SelfAttention):
    """megatron-core's attention, for training only.

    The fused rotary embedding reads and writes the heads once.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **inference: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S/tp, B, H], and angles [S, 1, 1, D] -> [S/tp, B, H]."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = rearrange(mixed, "s b (k n d) -> s b k n d", k=groups, d=width)  # each KV head follows its query heads
        if self.q_layernorm is not None:
            query, key, value = _split_heads(heads)
            heads = torch.cat([self.q_layernorm(query), self.k_layernorm(key), value], dim=3)
        cos, sin = rotary_pos_emb.cos().unsqueeze(3), rotary_pos_emb.sin().unsqueeze(3)
        query, key, value = (states.flatten(2, 3) for states in fused(rotate_heads, heads)(heads, cos, sin))
        if self.checkpoint_core_attention:
            context = self._checkpointed_attention_forward(query, key, value, attention_mask)
        else:
            context = self.core_attention(query, key, value, attention_mask)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(context)
        return output


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [S, B, K, N/K + 2, D] (queries, key, value per KV head) into rotated queries, rotated keys and values."""
    query, key, value = _split_heads(heads)
    return rotate(query, cos, sin), rotate(key, cos, sin), value.contiguous()


def _split_heads(heads: Tensor) -> tuple[Tensor, ...]:
    return heads.split([heads.shape[3] - 2, 1, 1], dim=3)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding (arXiv 2104.09864) to pairs half a head apart, as in Llama: [..., D] -> [..., D].

    `cos` and `sin` are computed for both halves of a head.
    """
    first, second = states.chunk(2, dim=-1)
    return states * cos.to(states.dtype) + torch.cat([-second, first], dim=-1) * sin.to(states.dtype)


class CausalAttention(nn.Module):
    """Causal grouped-query attention with torch's SDPA kernels, without S×S scores in memory or repeated KV heads.

    Under context parallelism, rank r has the chunks r and 2·cp−1−r of the sequence (zigzag). If cp divides the KV
    heads, ranks exchange parts of the sequence for parts of the heads and attend over whole sequences (arXiv
    2309.14509). Otherwise, keys and values are gathered, and each chunk attends to the keys up to its end, so that all
    ranks do the same work. Only torch's own flash kernel supports queries that are shorter than their keys.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [S, B, N, D], key and value [S, B, K, D] -> [S, B, N·D]."""
        if self.cp_group.size() == 1:
            context = self._attend(query, key, value)
        elif key.shape[2] % self.cp_group.size() == 0:
            context = self._to_sequence(self._attend(*self._to_heads(query, key, value)))
        else:
            context = self._by_chunks(query, key, value)
        return context.flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend over whole sequences. Return [S, B, N, D]."""
        query, key, value = (rearrange(tensor, "s b n d -> b n s d") for tensor in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)
        return rearrange(context, "b n s d -> s b n d")

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Exchange two chunks of all heads [S, B, N, D] for whole sequences of some heads [S·cp, B, N/cp, D].

        Each pair of context-parallel ranks exchanges one message.
        """
        size = self.cp_group.size()
        parts = [rearrange(tensor, "s b (r n) d -> r s b n d", r=size) for tensor in tensors]
        mine = all_to_all(self.cp_group, torch.cat(parts, dim=3)).flatten(0, 1)
        return [self._in_order(part) for part in mine.split([part.shape[3] for part in parts], dim=2)]

    def _to_sequence(self, context: Tensor) -> Tensor:
        """The way back of `_to_heads`: [S·cp, B, N/cp, D] -> [S, B, N, D]."""
        size = self.cp_group.size()
        chunks = context.chunk(2 * size)
        zigzag = [chunk for rank in range(size) for chunk in (chunks[rank], chunks[2 * size - 1 - rank])]
        return rearrange(all_to_all(self.cp_group, torch.cat(zigzag)), "(r s) b n d -> s b (r n) d", r=size)

    def _by_chunks(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from a context-parallel rank's two chunks to all keys and values. Return [S, B, N, D]."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        chunk = query.shape[0] // 2
        key, value = (
            self._in_order(gather_from_sequence_parallel_region(tensor, group=self.cp_group)) for tensor in (key, value)
        )
        query, key, value = (rearrange(tensor, "s b n d -> b n s d") for tensor in (query, key, value))
        parts = []
        for queries, position in zip(query.split(chunk, dim=2), (rank, 2 * size - 1 - rank), strict=True):
            end = (position + 1) * chunk
            parts.append(
                F.scaled_dot_product_attention(
                    queries,
                    key[:, :, :end],
                    value[:, :, :end],
                    attn_mask=_causal_mask(chunk, end),
                    scale=self.scale,
                    enable_gqa=True,
                )
            )
        return rearrange(torch.cat(parts, dim=2), "b n s d -> s b n d")

    def _in_order(self, ranks: Tensor) -> Tensor:
        """Reorder the parts of all ranks, [S·cp, …] rank by rank, from zigzag into sequence order."""
        chunks = ranks.chunk(2 * self.cp_group.size())
        return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])


@cache
def _causal_mask(num_queries: int, num_keys: int) -> CausalBias:
    """Return the mask of the last `num_queries` rows of a causal square.

    The mask is cached, because none can be created while operations are counted.
    """
    return causal_lower_right(num_queries, num_keys)


def zigzag_slice(tokens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return the part of [B, S] of a context-parallel rank: chunks r and 2·cp−1−r, as [B, S/cp]."""
    if cp_size == 1:
        return tokens
    chunks = tokens.chunk(2 * cp_size, dim=1)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]], dim=1)


def llama_blocks(layers: range, run: ResolvedConfig) -> TransformerBlockSubmodules:
    """Return the specs of the parallel layers with these numbers in the model, and of the final norm."""
    return TransformerBlockSubmodules(
        layer_specs=[_llama_block(number, run) for number in layers], layer_norm=_norm(run)
    )


def _norm(run: ResolvedConfig) -> type[RMSNorm]:
    return FusedNorm if fuses_blocks(run) else RMSNorm


def _llama_block(number: int, run: ResolvedConfig) -> ModuleSpec:
    """Return the spec of a parallel layer.

    In model families with query and key norms, the norms over D precede the rotary embedding.
    """
    layer, attention, activation = (
        (LlamaLayer, RotaryAttention, SwiGLU) if fuses_blocks(run) else (TransformerLayer, SelfAttention, None)
    )
    if number in run.fp8_layers:
        activation = Fp8SwiGLU
    column, row = _linear_layers(number, run)
    norm, qk_norm = _norm(run), run.shape.table.qk_norm
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=attention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=CausalAttention,
                    linear_proj=row,
                    q_layernorm=norm if qk_norm else None,
                    k_layernorm=norm if qk_norm else None,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp_spec(MLPSubmodules(linear_fc1=column, activation_func=activation, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _linear_layers(number: int, run: ResolvedConfig) -> tuple[ModuleSpec, ModuleSpec]:
    """Return the specs of the column-parallel and the row-parallel layers in a parallel layer."""
    if not fuses_blocks(run):
        return ModuleSpec(module=ColumnParallelLinear), ModuleSpec(module=RowParallelLinear)
    own = MegatronSettings.of(run)
    params: dict[str, Any] = {"way": tp_overlap(run)}
    column: type[ColumnParallelLinear] = ColumnLinear
    row: type[RowParallelLinear] = RowLinear
    if number in run.fp8_layers:
        params |= {"has_bf16_gradients": run.fp8_recipe == "bf16-gradients", "keeps_transposed": own.keep_transposed}
        column, row = Fp8ColumnLinear, Fp8RowLinear
    of_column = params | {"keeps_gathered": own.keep_gathered}
    return ModuleSpec(module=column, params=of_column), ModuleSpec(module=row, params=params)
