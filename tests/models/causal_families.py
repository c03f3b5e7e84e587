"""Tiny models of every type for which the installed transformers has a causal language model."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megabench.models.families import FAMILIES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
DROPOUT = 0.1
VOCABULARY = 300

# The names that configurations give to sizes, by the value in a tiny model.
_NAMES_OF_SIZES = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size ngram_vocab_size_base "
    "encoder_hash_byte_group_vocab pronunciation_vocab_size shape_vocab_size",
    128: "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length "
    "dense_intermediate_size",
    112: "intermediate_size intermediate_size_mlp ffn_dim n_inner dff dim_ff d_inner encoder_ffn_dim decoder_ffn_dim "
    "ffn_hidden_size feed_forward_size",
    64: "hidden_size n_embd d_model emb_dim embedding_dim embedding_size input_embedding_size output_embedding_size "
    "attention_hidden_size backbone_hidden_size word_embed_proj_dim lru_width image_size mamba_d_ssm "
    "router_hidden_size pronunciation_embed_dim shape_embed_dim adapter_in_dim adapter_out_dim adapter_input_size",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size q_lora_rank "
    "shared_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size laurel_rank o_lora_rank "
    "attention_window_size mamba_chunk_size chunk_size ple_embed_dim index_head_dim num_centroids",
    16: "head_dim attention_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim kv_lora_rank kv_channels "
    "linear_key_head_dim linear_value_head_dim linear_head_dim d_head dim_head rotary_dim hidden_size_per_layer_input "
    "mamba_headdim mamba_head_dim mamba_d_head attention_head_size swa_head_dim gated_norm_rank d_rel rel_extent "
    "index_topk patch_size adapter_rank centroid_intermediate_top_k hc_lowrank indexer_head_dim indexer_budget",
    8: "sliding_window sliding_window_size state_size mamba_d_state ssm_state_size mamba_n_heads mamba_num_heads "
    "n_mamba_heads attention_chunk_size image_seq_length window_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts time_step_rank mamba_dt_rank linear_num_value_heads linear_num_heads index_n_heads "
    "swa_num_attention_heads zero_expert_num indexer_n_heads",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth "
    "num_encoder_layers num_blocks num_layers_per_stack num_key_value_heads num_kv_heads num_experts_per_tok "
    "num_experts_per_token moe_topk moe_k linear_num_key_heads swa_num_key_value_heads",
    1: "n_group topk_group n_groups mamba_n_groups mamba_ngroups num_expert_group first_k_dense_replace "
    "num_dense_layers num_nextn_predict_layers n_shared_experts indexer_kv_heads",
    0: "num_kv_shared_layers",
}  # fmt: skip
SIZES = {name: size for size, names in _NAMES_OF_SIZES.items() for name in names.split()}
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")

# Fields that the sizes above leave inconsistent, or without which a type has no causal model.
_FIELDS_OF_TYPES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "diffllama": {"attention_dropout": 0.0},  # transformers rejects any other value
    "dots3_note_text": {"num_key_value_heads": 4, "layer_types": ["indexed_attention"] * 2},
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": {"mamba_d_head": 8},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    | {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "qwen4_exp_text": {"num_key_value_heads": 1, "indexer_compress_ratio": 2},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"]}
    | {"axial_pos_shape": [4, 8], "axial_pos_embds_dim": [32, 32]},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"num_key_value_heads": 4},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4}
    | {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}

# Types of which transformers cannot build a causal model here: the reason, and what transformers' message contains.
UNBUILT = {
    "gemma3n": ("the vision tower needs the package timm", "requires the timm library"),
    "gemma4_assistant": ("the default configuration is invalid", "hidden_size_per_layer_input must be 0"),
    "gemma4_unified_assistant": ("it reads the keys of the model for which it drafts", "layer types producing a cache"),
    "musicgen": ("the causal model has the configuration of a part", "no attribute 'dropout'"),
    "musicgen_melody": ("the causal model has the configuration of a part", "no attribute 'dropout'"),
}


class TinyModel(NamedTuple):
    model_type: str
    fields: dict[str, Any]


# Types whose attention is causal only with is_decoder.
_ENCODERS = [
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
]  # fmt: skip
# Variants that megabench trained exactly before this test existed.
_EXACT = json.loads(Path(__file__).with_name("families_exact.json").read_text())
MODELS = {name: TinyModel(name, {}) for name in TYPES if name not in UNBUILT}
MODELS |= {f"exact-{name}": TinyModel(*row) for name, row in _EXACT.items()}
MODELS |= {f"{name}-decoder": TinyModel(name, {"is_decoder": True}) for name in _ENCODERS}
MODELS |= {
    "gpt2-scaled": TinyModel("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-16-positions": TinyModel("gpt2", {"n_positions": 16}),
    "granitemoehybrid-dense": TinyModel("granitemoehybrid", {"num_local_experts": 0}),
    "gpt2-untied": TinyModel("gpt2", {"tie_word_embeddings": False}),
    "llama-bidirectional": TinyModel("llama", {"is_causal": False}),
    "llama-dropout": TinyModel("llama", {"attention_dropout": DROPOUT}),
    "llama-padding": TinyModel("llama", {"pad_token_id": 5}),  # its embedding gets no gradient
    "llama-tied": TinyModel("llama", {"tie_word_embeddings": True}),
    "nemotron_h-dense": TinyModel("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"]}),
    "xlm-causal": TinyModel("xlm", {"causal": True}),
}


# What a refusal must say, by model. All other models must be trained by every engine but megatron.
_NAMES_BY_REFUSAL = {
    "mixtures of experts": "afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_v2 deepseek_v3 "
    "deepseek_v32 deepseek_v4 dots1 dots3_note dots3_note_text ernie4_5_moe exaone_moe flex_olmo glm4_moe "
    "glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe "
    "hy_v3 hy_v4 inkling2_text inkling_text jamba jetmoe kimi_linear kolibri1 laguna lfm2_moe llama4 llama4_text "
    "longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mixtral nemotron_h olmoe phimoe "
    "qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text solar_open zaya",
    "no gradient": "bart bigbird_pegasus blenderbot blenderbot-small hrm_text marian mbart mvp pegasus plbart "
    "prophetnet trocr whisper big_bird-decoder roformer-decoder",
    "attention to later tokens": "xlnet bert bert-generation big_bird camembert cpmant data2vec-text electra ernie "
    "megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl "
    "exact-bert0 llama-bidirectional",
    "language model|multimodal": "emu3 fuyu gemma3 gemma4 gemma4_unified git got_ocr2 mllama moss_transcribe_diarize "
    "phi4_multimodal",
    "engines cannot be compared": "reformer xmod xmod-decoder",
    "transformers converts the stored tensor": "olmo_hybrid",
    "does not know the": "blt",
    "exceeds the 16 positions": "gpt2-16-positions",
}
REFUSALS = {name: message for message, names in _NAMES_BY_REFUSAL.items() for name in names.split()}
# Models for which the megatron engine reports missing tensor-parallel blocks before the reason above is checked.
REFUSED_LATE = {"olmo_hybrid", "gpt2-16-positions"}
# Models that the megatron engine's blocks compute. It refuses all others.
PARALLEL = ("llama", "qwen2", "qwen3", "exact-llama", "llama-padding", "llama-tied")


def tiny_config(model: TinyModel) -> PreTrainedConfig:
    """Return a configuration of two layers, or one layer for each kind of layer, with dropout wherever it is possible.

    The types with tensor-parallel blocks have no dropout, which the blocks refuse.
    """
    kind = CONFIG_MAPPING[model.model_type]
    return kind(**_tiny_fields(kind) | model.fields)


def _tiny_fields(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    default = kind()
    has_dropout = kind.model_type not in FAMILIES or not FAMILIES[kind.model_type].has_parallel_blocks
    tiny: dict[str, Any] = {}
    for field in fields(kind):
        name, value = field.name, field.default
        if name in kind.sub_configs:
            if sub := getattr(default, name):
                tiny[name] = _tiny_fields(type(sub)) | {"model_type": sub.model_type}
        elif name in SIZES:
            tiny[name] = SIZES[name]
        elif "drop" in name and isinstance(value, float):
            tiny[name] = DROPOUT if has_dropout else 0.0
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            tiny[name] = None if name == "pad_token_id" and type(None) in get_args(field.type) else 3
    return tiny | _tiny_layers(default) | _FIELDS_OF_TYPES.get(kind.model_type, {})


def _tiny_layers(default: PreTrainedConfig) -> dict[str, Any]:
    """Return lists of layers that have every kind of layer once, if a model has several."""
    lists = {field.name: getattr(default, field.name) for field in fields(default) if field.name in _LAYER_LISTS}
    kinds = {name: list(dict.fromkeys(layers)) for name, layers in lists.items() if isinstance(layers, list)}
    if max(map(len, kinds.values()), default=1) == 1:
        return {}
    num_layers = max(map(len, kinds.values()))
    padded = {name: layers + layers[-1:] * (num_layers - len(layers)) for name, layers in kinds.items()}
    return padded | {"num_hidden_layers": num_layers}


def save_model(folder: Path, model: TinyModel) -> None:
    """Save a model with transformers. Every parameter is random: at their defaults norms could be swapped unseen."""
    torch.manual_seed(1)
    built = AutoModelForCausalLM.from_config(tiny_config(model), dtype=torch.float32)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1 if parameter.ndim < 2 else 0.03)
    built.save_pretrained(folder)
