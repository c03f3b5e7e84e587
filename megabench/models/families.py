"""Tables of Hugging Face tensors per model family, with shapes and tensor-parallel split. Loads no torch.

To add a family whose blocks differ from the supported blocks only in their tensors, add one table.
"""

from dataclasses import dataclass
from typing import Literal

# How tensor parallelism splits a parallel parameter: "whole"       Every rank has a copy of the whole parameter. "rows"
# Each rank has its share of the rows of each Hugging Face tensor, concatenated: [gate; up]. "columns"     Each rank has
# its share of the columns of the Hugging Face tensor. "vocabulary"  Each rank has its share of the vocabulary's rows,
# which are padded to a multiple of tp. "groups"      Each rank has its share of the query groups, each stored as [query
# heads, key head, value head].
Cut = Literal["whole", "rows", "columns", "vocabulary", "groups"]

# Symbols for the sizes in a tensor's shape. "h 3h" means [hidden, 3·hidden], and a number is a literal size.
# The symbols are v (vocabulary), h (hidden), q (heads·head_dim), k (KV heads·head_dim), d (head_dim), f (FFN size)
# and p (positions).
Dims = str


@dataclass(frozen=True)
class Rule:
    """A parallel parameter and its Hugging Face tensors.

    `parameter` is None if the family has no tensor-parallel blocks.
    """

    parameter: str | None
    tensors: dict[str, Dims]
    cut: Cut


@dataclass(frozen=True)
class Family:
    """A model family, named by transformers' `model_type`.

    A tensor name in `layer` is appended to `layer_prefix` and the layer number. `residual` contains the name suffixes
    of the matrices that write into the residual stream.
    """

    name: str
    layer_prefix: str
    first: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    last: tuple[Rule, ...]
    residual: tuple[str, ...]
    positions: Literal["rotary", "learned", "alibi"] = "rotary"
    qkv_bias: bool = False
    qk_norm: bool = False
    has_linear_layers: bool = True
    """Whether the blocks' matrices belong to `nn.Linear` layers, [output size, input size]."""

    @property
    def embedding(self) -> str:
        """The name of the token embedding, which is also the weight of a tied output layer."""
        return next(iter(self.first[0].tensors))

    @property
    def has_parallel_blocks(self) -> bool:
        return bool(self.layer) and all(rule.parameter for rule in self.layer)


OUTPUT = "output_layer.weight"  # megatron-core's name of the output layer's weight, which may be tied to the embedding

_LLAMA_FIRST = (Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": "v h"}, "vocabulary"),)
_LLAMA_LAYER = (
    Rule("input_layernorm.weight", {"input_layernorm.weight": "h"}, "whole"),
    Rule(
        "self_attention.linear_qkv.weight",
        {"self_attn.q_proj.weight": "q h", "self_attn.k_proj.weight": "k h", "self_attn.v_proj.weight": "k h"},
        "groups",
    ),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "h q"}, "columns"),
    Rule("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": "h"}, "whole"),
    Rule("mlp.linear_fc1.weight", {"mlp.gate_proj.weight": "f h", "mlp.up_proj.weight": "f h"}, "rows"),
    Rule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "h f"}, "columns"),
)
_LLAMA_LAST = (
    Rule("decoder.final_layernorm.weight", {"model.norm.weight": "h"}, "whole"),
    Rule(OUTPUT, {"lm_head.weight": "v h"}, "vocabulary"),
)
_QKV_BIAS = (
    Rule(
        "self_attention.linear_qkv.bias",
        {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "k", "self_attn.v_proj.bias": "k"},
        "groups",
    ),
)
_QK_NORM = (
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "d"}, "whole"),
    Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "d"}, "whole"),
)


def _llama_like(name: str, extra: tuple[Rule, ...] = (), qkv_bias: bool = False, qk_norm: bool = False) -> Family:
    return Family(
        name=name,
        layer_prefix="model.layers.",
        first=_LLAMA_FIRST,
        layer=_LLAMA_LAYER + extra,
        last=_LLAMA_LAST,
        residual=("o_proj.weight", "down_proj.weight"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _unsplit(tensors: dict[str, Dims]) -> tuple[Rule, ...]:
    return tuple(Rule(None, {name: dims}, "whole") for name, dims in tensors.items())


_GPT2 = Family(
    name="gpt2",
    layer_prefix="transformer.h.",
    first=_unsplit({"transformer.wte.weight": "v h", "transformer.wpe.weight": "p h"}),
    layer=_unsplit(
        {
            "ln_1.weight": "h", "ln_1.bias": "h",
            "attn.c_attn.weight": "h 3h", "attn.c_attn.bias": "3h",
            "attn.c_proj.weight": "h h", "attn.c_proj.bias": "h",
            "ln_2.weight": "h", "ln_2.bias": "h",
            "mlp.c_fc.weight": "h f", "mlp.c_fc.bias": "f",
            "mlp.c_proj.weight": "f h", "mlp.c_proj.bias": "h",
        }
    ),
    last=_unsplit({"transformer.ln_f.weight": "h", "transformer.ln_f.bias": "h"}),
    residual=("c_proj.weight",),
    positions="learned",
    has_linear_layers=False,
)  # fmt: skip

_BLOOM = Family(
    name="bloom",
    layer_prefix="transformer.h.",
    first=_unsplit(
        {
            "transformer.word_embeddings.weight": "v h",
            "transformer.word_embeddings_layernorm.weight": "h", "transformer.word_embeddings_layernorm.bias": "h",
        }
    ),
    layer=_unsplit(
        {
            "input_layernorm.weight": "h", "input_layernorm.bias": "h",
            "self_attention.query_key_value.weight": "3h h", "self_attention.query_key_value.bias": "3h",
            "self_attention.dense.weight": "h h", "self_attention.dense.bias": "h",
            "post_attention_layernorm.weight": "h", "post_attention_layernorm.bias": "h",
            "mlp.dense_h_to_4h.weight": "f h", "mlp.dense_h_to_4h.bias": "f",
            "mlp.dense_4h_to_h.weight": "h f", "mlp.dense_4h_to_h.bias": "h",
        }
    ),
    last=_unsplit({"transformer.ln_f.weight": "h", "transformer.ln_f.bias": "h"}),
    residual=("self_attention.dense.weight", "dense_4h_to_h.weight"),
    positions="alibi",
)  # fmt: skip

FAMILIES = {
    family.name: family
    for family in (
        _llama_like("llama"),
        _llama_like("mistral"),
        _llama_like("qwen2", _QKV_BIAS, qkv_bias=True),
        _llama_like("qwen3", _QK_NORM, qk_norm=True),
        _GPT2,
        _BLOOM,
    )
}
