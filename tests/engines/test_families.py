"""Models read from Hugging Face directories: every family, every way to cut it, as transformers in one process."""

from typing import Any

import pytest

from tests.engines.equivalence import OPTIMIZERS, assert_equal_to_reference
from tests.models.tiny import CATALOG, FAMILIES, save_model

pytestmark = pytest.mark.distributed


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
        ("qwen3-tiny", 4, {"tp": 2, "pp": 2, "recompute": "full"}),
        ("qwen2-tiny", 4, {"tp": 2, "pp": 2, "kernels": "reference"}),
    ],
)
def test_parallel_blocks_otherwise(family: str, world_size: int, fields: dict[str, Any]) -> None:
    assert_equal_to_reference(world_size, model=family, **fields, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp", "ddp"])
@pytest.mark.parametrize("family", ["qwen2-tiny", "qwen3-tiny"])
def test_data_parallel_engines_read_directories(folders: dict[str, str], family: str, engine: str) -> None:
    assert_equal_to_reference(2, model=folders[family], num_layers=None, engine=engine, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp", "ddp"])
@pytest.mark.parametrize("family", ["gpt2-tiny", "bloom-tiny"])
def test_families_without_parallel_blocks(family: str, engine: str) -> None:
    assert_equal_to_reference(2, model=family, num_layers=2, engine=engine, **OPTIMIZERS["adamw"])
