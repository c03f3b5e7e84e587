"""Saves a random Llama of two billion parameters in bf16, as transformers does: `python make_model.py DIR`."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    tie_word_embeddings=False,
    dtype="bfloat16",
)
torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model.to_empty(device="cpu")
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for parameter in model.parameters():
        is_norm = parameter.ndim == 1
        parameter.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else 0.02, generator=generator)
model.save_pretrained(sys.argv[1], max_shard_size="2GB")
print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
