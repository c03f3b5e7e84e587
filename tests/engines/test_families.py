"""Models read from Hugging Face directories: every family, every way to cut it, as transformers in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    Gemma2Config,
    Gemma3TextConfig,
    OPTConfig,
    PreTrainedConfig,
    Starcoder2Config,
)

from megabench.config import ConfigError, ResolvedConfig
from megabench.engines.build import build_engine
from megabench.engines.common.transformers_engine import TransformersEngine
from megabench.specs.registry import ENGINES
from tests import distributed
from tests.engines.equivalence import OPTIMIZERS, assert_equal_to_reference, device_of, resolve
from tests.models.causal_families import MODELS
from tests.models.causal_families import save_model as save_tiny
from tests.models.tiny import CATALOG, FAMILIES, save_config, save_model

pytestmark = pytest.mark.distributed

DATA_PARALLEL = [name for name, spec in ENGINES.items() if not spec.needs_blocks]
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A saved model of three layers for each family."""
    folders = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp("models") / name
        save_model(folder, CATALOG[name].with_layers(3))
        folders[name] = str(folder)
    return folders


@pytest.mark.parametrize("family", FAMILIES)
def test_parallel_blocks(folders: dict[str, str], family: str) -> None:
    assert_equal_to_reference(4, model=folders[family], num_layers=None, tp=2, pp=2, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize(
    ("family", "world_size", "fields"),
    [
        ("llama32-tiny", 4, {"tp": 4, "micro_batch": 4}),
        ("llama32-tiny", 4, {"pp": 2, "vp": 2}),  # tied ends in two chunks of one pipeline, and replicas
        ("qwen2-tiny", 4, {"tp": 2, "cp": 2, "micro_batch": 2}),
        ("llama-padded", 4, {"tp": 2, "pp": 2}),
        ("llama-padded", 4, {"tp": 2, "cp": 2, "micro_batch": 2, "kernels": "reference"}),
        ("llama-padded-tied", 4, {"tp": 2, "pp": 2, "vp": 2}),
        ("qwen3-tiny", 4, {"tp": 2, "pp": 2, "recompute": "full"}),
        ("qwen2-tiny", 4, {"tp": 2, "pp": 2, "kernels": "reference"}),
    ],
)
def test_parallel_blocks_otherwise(family: str, world_size: int, fields: dict[str, Any]) -> None:
    assert_equal_to_reference(world_size, model=family, **fields, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize("engine", DATA_PARALLEL)
@pytest.mark.parametrize("name", ["falcon_h1", "openai-gpt", "xglm", "apertus", "gemma3_text", "rwkv"])
def test_buffers_are_those_of_transformers(tmp_path: Path, engine: str, name: str) -> None:
    """Buffers have the values and dtypes that transformers gives them in bf16, because activations meet them there."""
    save_tiny(tmp_path, MODELS[name])
    run = resolve(1, model=str(tmp_path), num_layers=None, engine=engine, precision="bf16")
    ours = distributed.run(buffers_of_engine, 1, run)[0]
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_buffers())
    assert ours.keys() == theirs.keys()
    for buffer, values in theirs.items():
        assert ours[buffer].dtype == values.dtype and torch.equal(ours[buffer], values), buffer


def buffers_of_engine(run: ResolvedConfig) -> dict[str, Tensor]:
    engine = build_engine(run, device_of(run))
    assert isinstance(engine, TransformersEngine)
    return {name: buffer.clone() for name, buffer in engine.buffers.model.named_buffers()}


@pytest.mark.parametrize("engine", DATA_PARALLEL)
@pytest.mark.parametrize("family", ["qwen2-tiny", "qwen3-tiny"])
def test_data_parallel_engines_read_directories(folders: dict[str, str], family: str, engine: str) -> None:
    assert_equal_to_reference(2, model=folders[family], num_layers=None, engine=engine, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize("engine", DATA_PARALLEL)
def test_tied_embeddings_whose_rows_the_ranks_do_not_divide(engine: str) -> None:
    assert_equal_to_reference(2, model="llama32-tiny", num_layers=2, engine=engine, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize("engine", [name for name, spec in ENGINES.items() if not spec.needs_blocks])
@pytest.mark.parametrize("family", ["gpt2-tiny", "bloom-tiny"])
def test_families_without_parallel_blocks(family: str, engine: str) -> None:
    assert_equal_to_reference(2, model=family, num_layers=2, engine=engine, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": "deepspeed", "kernels": "reference"},
        {"engine": "deepspeed", "zero_leaf_layers": True, "recompute": "full"},
        {"engine": "fsdp", "recompute": "full"},
    ],
    ids=str,
)
def test_bloom_otherwise(fields: dict[str, Any]) -> None:
    assert_equal_to_reference(2, model="bloom-tiny", num_layers=2, **fields, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        (Starcoder2Config(num_hidden_layers=2, num_key_value_heads=2, residual_dropout=0.1, **SMALL), "deepspeed"),
        (OPTConfig(num_hidden_layers=2, ffn_dim=128, word_embed_proj_dim=64, **SMALL), "fsdp"),
        (Gemma2Config(num_hidden_layers=2, num_key_value_heads=2, head_dim=16, **SMALL), "deepspeed"),
        (Gemma3TextConfig(num_hidden_layers=2, num_key_value_heads=2, head_dim=16, **SMALL), "fsdp"),
        (
            Gemma3TextConfig(
                num_hidden_layers=2, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, **SMALL
            ),
            "megatron_fsdp",  # the embedding has a buffer, which the library allocates again
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_models_that_no_table_describes(tmp_path: Path, config: PreTrainedConfig, engine: str) -> None:
    check_model_that_no_table_describes(tmp_path, config, engine)


def check_model_that_no_table_describes(tmp_path: Path, config: PreTrainedConfig, engine: str) -> None:
    save_config(tmp_path / "model", config)
    assert_equal_to_reference(2, model=str(tmp_path / "model"), num_layers=None, engine=engine, **OPTIMIZERS["adamw"])
    with pytest.raises(ConfigError, match="the megatron engine has no tensor-parallel blocks for it"):
        resolve(1, model=str(tmp_path / "model"), num_layers=None)


def build(fields: dict[str, Any]) -> None:
    build_engine(resolve(1, **fields), torch.device("cpu"))


def test_a_model_that_transformers_cannot_recompute_is_refused(tmp_path: Path) -> None:
    save_config(tmp_path / "model", CTRLConfig(vocab_size=256, n_positions=64, n_embd=64, dff=128, n_layer=2, n_head=4))
    fields = {"model": str(tmp_path / "model"), "num_layers": None, "engine": "ddp"}
    distributed.run(build, 1, fields)
    words = "UnsupportedModelError: recompute=full is not possible with .*CTRLLMHeadModel"
    with pytest.raises(distributed.DistributedTestError, match=words):
        distributed.run(build, 1, fields | {"recompute": "full"})
