"""Catalogue of named model shapes with their default training settings. Loads no torch."""

import os
import re

from megabench.errors import UserError, near_names
from megabench.models.shape import ModelShape, RopeScaling


class UnknownModelError(UserError):
    """Raised if a model name is not in the catalog."""


_SHAPES = (
    ModelShape(
        name="llama-tiny", family="llama",
        num_layers=8, hidden_size=128, num_heads=8, num_kv_heads=4, head_dim=16, ffn_size=384, vocab_size=512,
        norm_eps=1e-5, rope_theta=500_000.0,
        seq_length=256, micro_batch=4, global_batch=16, learning_rate=3e-3, lr_warmup=10,
        source="megabench: a test model for 8 processes on 2 cores; supports every layout up to tp=4 and pp·vp=8",
    ),
    ModelShape(
        name="llama-tiny-tp8", family="llama",
        num_layers=8, hidden_size=128, num_heads=16, num_kv_heads=8, head_dim=16, ffn_size=384, vocab_size=512,
        norm_eps=1e-5, rope_theta=500_000.0,
        seq_length=256, micro_batch=4, global_batch=16, learning_rate=3e-3, lr_warmup=10,
        source="megabench: llama-tiny with enough heads for tp=8",
    ),
    ModelShape(
        name="llama-0.5b-bytes", family="llama",
        num_layers=9, hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128, ffn_size=7168, vocab_size=512,
        norm_eps=1e-5, rope_theta=500_000.0,
        seq_length=2048, micro_batch=16, global_batch=16, learning_rate=3e-4, lr_warmup=100,
        source="megabench: 0.5 billion parameters without a large vocabulary, for loss curves on one GPU in minutes",
    ),
    ModelShape(
        name="qwen3-tiny", family="qwen3",
        num_layers=8, hidden_size=128, num_heads=8, num_kv_heads=4, head_dim=32, ffn_size=384, vocab_size=512,
        norm_eps=1e-6, rope_theta=1_000_000.0,
        seq_length=256, micro_batch=4, global_batch=16, learning_rate=3e-3, lr_warmup=10,
        source="a test model of megabench, like llama-tiny",
    ),
    ModelShape(
        name="gpt2-tiny", family="gpt2",
        num_layers=4, hidden_size=128, num_heads=8, num_kv_heads=8, head_dim=16, ffn_size=512, vocab_size=512,
        norm_eps=1e-5, num_positions=256, tied_embeddings=True,
        seq_length=256, micro_batch=4, global_batch=16, learning_rate=3e-3, lr_warmup=10,
        source="a test model of megabench, like llama-tiny",
    ),
    ModelShape(
        name="bloom-tiny", family="bloom",
        num_layers=4, hidden_size=128, num_heads=8, num_kv_heads=8, head_dim=16, ffn_size=512, vocab_size=512,
        norm_eps=1e-5, tied_embeddings=True,
        seq_length=256, micro_batch=4, global_batch=16, learning_rate=3e-3, lr_warmup=10,
        source="a test model of megabench, like llama-tiny",
    ),
    ModelShape(
        name="llama3-8b", family="llama",
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256,
        norm_eps=1e-5, rope_theta=500_000.0,
        seq_length=8192, micro_batch=1, global_batch=32, learning_rate=3e-4, lr_warmup=2000,
        source="Llama 3 model card and config.json of Meta-Llama-3-8B; learning rate: arXiv 2407.21783 table 3; "
        "warm-up: arXiv 2307.09288",
    ),
    ModelShape(
        name="llama3-70b", family="llama",
        num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=28672, vocab_size=128256,
        norm_eps=1e-5, rope_theta=500_000.0,
        seq_length=8192, micro_batch=1, global_batch=64, learning_rate=1.5e-4, lr_warmup=2000,
        source="Llama 3 model card and config.json of Meta-Llama-3-70B; learning rate: arXiv 2407.21783 table 3; "
        "warm-up: arXiv 2307.09288",
    ),
    ModelShape(
        name="llama3-405b", family="llama",
        num_layers=126, hidden_size=16384, num_heads=128, num_kv_heads=8, head_dim=128, ffn_size=53248,
        vocab_size=128256, norm_eps=1e-5, rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
        seq_length=8192, micro_batch=1, global_batch=128, learning_rate=8e-5, lr_warmup=8000,
        source="arXiv 2407.21783 table 3 and section 3.4.1 (warm-up); rotary scaling: config.json of Llama-3.1-405B",
    ),
    ModelShape(
        name="mistral-7b", family="mistral",
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=32768,
        norm_eps=1e-5, rope_theta=1_000_000.0,
        seq_length=8192, micro_batch=1, global_batch=32, learning_rate=3e-4, lr_warmup=2000,
        source="config.json of Mistral-7B-v0.3, which has no sliding window; learning rate: unpublished, so "
        "llama3-8b's",
    ),
    ModelShape(
        name="qwen3-0.6b", family="qwen3",
        num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128, ffn_size=3072, vocab_size=151936,
        norm_eps=1e-6, rope_theta=1_000_000.0, tied_embeddings=True,
        seq_length=4096, micro_batch=1, global_batch=32, learning_rate=3e-4, lr_warmup=2000,
        source="arXiv 2505.09388 table 1 and config.json of Qwen3-0.6B; learning rate: unpublished, so llama3-8b's",
    ),
    ModelShape(
        name="qwen3-8b", family="qwen3",
        num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=12288, vocab_size=151936,
        norm_eps=1e-6, rope_theta=1_000_000.0,
        seq_length=4096, micro_batch=1, global_batch=32, learning_rate=3e-4, lr_warmup=2000,
        source="arXiv 2505.09388 table 1 and config.json of Qwen3-8B; learning rate: unpublished, so llama3-8b's",
    ),
    ModelShape(
        name="gpt2", family="gpt2",
        num_layers=12, hidden_size=768, num_heads=12, num_kv_heads=12, head_dim=64, ffn_size=3072, vocab_size=50257,
        norm_eps=1e-5, num_positions=1024, tied_embeddings=True,
        seq_length=1024, micro_batch=1, global_batch=32, learning_rate=6e-4, lr_warmup=2000,
        source="GPT-2 report table 2 and config.json of GPT-2; learning rate: arXiv 2005.14165 table 2.1, 125M",
    ),
    ModelShape(
        name="gpt2-xl", family="gpt2",
        num_layers=48, hidden_size=1600, num_heads=25, num_kv_heads=25, head_dim=64, ffn_size=6400, vocab_size=50257,
        norm_eps=1e-5, num_positions=1024, tied_embeddings=True,
        seq_length=1024, micro_batch=1, global_batch=32, learning_rate=2e-4, lr_warmup=2000,
        source="GPT-2 report table 2 and config.json of GPT-2; learning rate: arXiv 2005.14165 table 2.1, 1.3B",
    ),
    ModelShape(
        name="bloom-560m", family="bloom",
        num_layers=24, hidden_size=1024, num_heads=16, num_kv_heads=16, head_dim=64, ffn_size=4096, vocab_size=250880,
        norm_eps=1e-5, tied_embeddings=True,
        seq_length=2048, micro_batch=1, global_batch=32, learning_rate=3e-4, lr_warmup=2000,
        source="arXiv 2211.05100 table 3 and config.json of bloom-560m",
    ),
    ModelShape(
        name="bloom-7b1", family="bloom",
        num_layers=30, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128, ffn_size=16384, vocab_size=250880,
        norm_eps=1e-5, tied_embeddings=True,
        seq_length=2048, micro_batch=1, global_batch=32, learning_rate=1.2e-4, lr_warmup=2000,
        source="arXiv 2211.05100 table 3 and config.json of bloom-7b1",
    ),
)  # fmt: skip

CATALOG = {shape.name: shape for shape in _SHAPES}


# Models of the Hugging Face Hub with exactly the shape of a model of the catalogue, in lower case.
HUB_NAMES = {
    "meta-llama/meta-llama-3-8b": "llama3-8b",
    "meta-llama/meta-llama-3-8b-instruct": "llama3-8b",
    "meta-llama/meta-llama-3-70b": "llama3-70b",
    "meta-llama/meta-llama-3-70b-instruct": "llama3-70b",
    "meta-llama/llama-3.1-405b": "llama3-405b",
    "meta-llama/llama-3.1-405b-instruct": "llama3-405b",
    "meta-llama/meta-llama-3.1-405b": "llama3-405b",
    "mistralai/mistral-7b-v0.3": "mistral-7b",
    "mistralai/mistral-7b-instruct-v0.3": "mistral-7b",
    "qwen/qwen3-0.6b": "qwen3-0.6b",
    "qwen/qwen3-0.6b-base": "qwen3-0.6b",
    "qwen/qwen3-8b": "qwen3-8b",
    "qwen/qwen3-8b-base": "qwen3-8b",
    "openai-community/gpt2": "gpt2",
    "openai-community/gpt2-xl": "gpt2-xl",
    "bigscience/bloom-560m": "bloom-560m",
    "bigscience/bloom-7b1": "bloom-7b1",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def get_model(name: str) -> ModelShape:
    """Return the shape of the catalogue model `name`. For other names, raise UnknownModelError with similar names."""
    if name in CATALOG:
        return CATALOG[name]
    raise unknown_model(name)


def unknown_model(name: str) -> UnknownModelError:
    """Return the error for a `name` that is neither a directory nor in the catalogue, with the nearest model."""
    same = HUB_NAMES.get(name.lower())
    if _HUB_NAME.fullmatch(name) and not os.path.exists(os.path.dirname(name)):
        folder = name.partition("/")[2]
        near = [same] if same else near_names(folder, CATALOG, most=1)
        random = (
            f" For {'the same' if same else 'a similar'} shape with random weights, use --model {near[0]}."
            if near
            else ""
        )
        return UnknownModelError(
            f"model={name} is not in the catalogue, and megabench downloads no models. Use hf download {name} "
            f"--local-dir {folder}, and --model {folder}.{random}"
        )
    if "/" in name:
        return UnknownModelError(
            f"model={name} is neither a directory nor a name of the catalogue. Known names: {', '.join(CATALOG)}."
        )
    on_hub = [model for hub, model in HUB_NAMES.items() if hub.partition("/")[2] == name.lower()]
    equal = [model for model in CATALOG if _letters(model) == _letters(name)]
    near = on_hub or equal or near_names(name, CATALOG, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known models: {', '.join(CATALOG)}"
    return UnknownModelError(f"unknown model {name!r}; {hint}")


def _letters(name: str) -> str:
    """Return the letters and digits of a name, so that "LLaMA-3-8B" and "llama3-8b" are equal."""
    return re.sub("[^a-z0-9]", "", name.lower())
