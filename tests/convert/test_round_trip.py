"""Import under any layout, export again: the same logits, the same bits."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.weights_only import open_weights
from megabench.convert import UnequalError
from megabench.convert.exporting import SHARD_BYTES, export_dtype, export_model
from megabench.convert.importing import import_model
from megabench.convert.proof import proof_of
from megabench.convert.verifying import Comparison, compare, comparison_run, sample_tokens
from megabench.models.find import find_model
from megabench.models.hugging_face import config_text
from megabench.models.mapping import Piece
from megabench.models.model_directory import INDEX, HuggingFaceWeights
from tests import distributed
from tests.models.tiny import CATALOG, FAMILIES, save_model

pytestmark = pytest.mark.distributed

LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "tp4": (4, 1), "pp2": (1, 2), "tp2-pp2": (2, 2)}


def quiet(what: str) -> None:
    """Moves no bar."""


def import_here(folder: Path, out: Path, tp: int, pp: int) -> Comparison | None:
    source = HuggingFaceWeights(folder)
    return import_model(
        source, out, comparison_run(str(folder), tp, pp), sample_tokens(folder, source.shape), quiet
    ).comparison


def export_here(checkpoint: Path, out: Path, shard_bytes: int = SHARD_BYTES) -> Comparison | None:
    weights = open_weights(checkpoint)
    shape = find_model(str(weights.folder))
    prove = proof_of(weights.folder, shape, weights.folder / "hugging_face").compare
    return export_model(weights, out, shape, export_dtype(weights), prove, quiet, shard_bytes).comparison


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_tensors(one: Path, other: Path) -> None:
    theirs, ours = tensors_of(one), tensors_of(other)
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model of five layers for each family, in fp32."""
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        save_model(root / name, CATALOG[name].with_layers(5))
    return {name: root / name for name in FAMILIES}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_import(tmp_path: Path, folders: dict[str, Path], family: str, layout: str) -> None:
    tp, pp = LAYOUTS[layout]
    comparisons = distributed.run(import_here, tp * pp, folders[family], tmp_path / "checkpoint", tp, pp)
    assert all(comparison == comparisons[0] for comparison in comparisons)
    assert comparisons[0] is not None and comparisons[0].num_tokens == 256
    assert comparisons[0].max_difference < 1e-5 and comparisons[0].agreement == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_back_every_bit(tmp_path: Path, folders: dict[str, Path], family: str) -> None:
    distributed.run(import_here, 4, folders[family], tmp_path / "checkpoint", 2, 2)
    (comparison,) = distributed.run(export_here, 1, tmp_path / "checkpoint", tmp_path / "exported")
    assert comparison is not None and comparison.max_difference < 1e-5
    assert_same_tensors(folders[family], tmp_path / "exported")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "exported" / name).read_text() == (folders[family] / name).read_text()


def test_an_export_can_be_read_by_all_whom_the_umask_allows(tmp_path: Path) -> None:
    save_model(tmp_path / "source", CATALOG["llama-tiny"].with_layers(1))
    distributed.run(import_here, 1, tmp_path / "source", tmp_path / "checkpoint", 1, 1)
    distributed.run(export_here, 1, tmp_path / "checkpoint", tmp_path / "exported")
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "exported").iterdir()}
    assert len(modes) >= 2 and set(modes.values()) == {modes["config.json"]}, modes


@pytest.mark.parametrize("family", ["llama32-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_several_files_in_bf16(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "source"
    model = save_model(source, CATALOG[family].with_layers(3), dtype=torch.bfloat16, max_shard_size="500KB")
    num_files = len(list(source.glob("*.safetensors")))
    assert num_files >= 3
    distributed.run(import_here, 4, source, tmp_path / "checkpoint", 2, 2)
    distributed.run(export_here, 1, tmp_path / "checkpoint", tmp_path / "exported", 500_000)
    assert_same_tensors(source, tmp_path / "exported")
    index = json.loads((tmp_path / "exported" / INDEX).read_text())
    listed = {name: set(load_file(tmp_path / "exported" / name)) for name in set(index["weight_map"].values())}
    assert all(name in listed[file] for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(p.numel() * 2 for p in model.parameters())
    assert ("lm_head.weight" in index["weight_map"]) is not CATALOG[family].tied_embeddings
    logging.enable_propagation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert loaded.dtype == torch.bfloat16
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(loaded(tokens).logits, AutoModelForCausalLM.from_pretrained(source)(tokens).logits)


def compare_swapped(folder: Path, one: str, other: str) -> Comparison:
    """The comparison of a model with itself after two of its tensors were exchanged."""

    class Swapped(HuggingFaceWeights):
        def read(self, wanted: Piece) -> torch.Tensor:
            name = {one: other, other: one}.get(wanted.name, wanted.name)
            return super().read(Piece(name, wanted.rows, wanted.columns))

    source = HuggingFaceWeights(folder)
    run = comparison_run(str(folder), 1, 1)
    return compare(source, Swapped(folder), quiet, run=run, tokens=sample_tokens(folder, source.shape))


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("llama-tiny", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ("llama-tiny", "input_layernorm.weight", "post_attention_layernorm.weight"),
        ("qwen2-tiny", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        ("qwen3-tiny", "self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    ],
)
def test_what_is_swapped_shows(folders: dict[str, Path], family: str, one: str, other: str) -> None:
    prefix = "model.layers.2."
    (comparison,) = distributed.run(compare_swapped, 1, folders[family], prefix + one, prefix + other)
    assert not comparison.is_equal, comparison


def import_another(folder: Path, out: Path) -> str:
    """What is said when the blocks compute something else than transformers does."""
    from unittest.mock import patch

    from megabench.engines.megatron import model

    with patch.object(model, "rotary_frequencies", lambda shape: torch.ones(shape.head_dim // 2)):
        try:
            import_here(folder, out, 2, 1)
        except UnequalError as error:
            return str(error)
    return ""


def test_what_is_not_equal_leaves_nothing(tmp_path: Path, folders: dict[str, Path]) -> None:
    for said in distributed.run(import_another, 2, folders["llama-tiny"], tmp_path / "checkpoint"):
        assert "its logits would differ from" in said and "logits differ by up to" in said
    assert list(tmp_path.iterdir()) == []


def exported(checkpoint: Path, out: Path) -> tuple[str, ...]:
    """The notes of an export without a comparison of logits."""
    weights = open_weights(checkpoint)
    return export_model(weights, out, find_model(str(checkpoint)), export_dtype(weights), None, quiet).notes


def test_only_files_of_the_model_are_exported(tmp_path: Path) -> None:
    source, checkpoint, out = tmp_path / "source", tmp_path / "checkpoint", tmp_path / "exported"
    save_model(source, CATALOG["llama-tiny"].with_layers(1))
    (source / "additional_chat_templates").mkdir()
    for name in ("README.md", "tekken.json", "additional_chat_templates/tool.jinja"):
        (source / name).write_text(name)
    (tmp_path / "private").write_text("secret")
    (source / "merges.txt").symlink_to(tmp_path / "private")
    distributed.run(import_here, 1, source, checkpoint, 1, 1)
    (checkpoint / "hugging_face" / "vocab.txt").symlink_to(tmp_path / "private")
    (checkpoint / "hugging_face" / "left.json").write_text("{}")
    notes = exported(checkpoint, out)
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert files == {
        *("config.json", "generation_config.json", "model.safetensors", "README.md", "tekken.json"),
        "additional_chat_templates/tool.jinja",
    }
    assert not [path for path in out.rglob("*") if path.is_symlink()]
    assert notes[:2] == tuple(
        f"not copied, because the manifest does not list it: '{name}'" for name in ("left.json", "vocab.txt")
    )
    listed = checkpoint / "hugging_face" / "README.md"
    listed.unlink()
    (tmp_path / "same").write_text("README.md")
    listed.symlink_to(tmp_path / "same")
    with pytest.raises(CheckpointError, match=r"README\.md is a link to a file outside the checkpoint"):
        exported(checkpoint, tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_the_configuration_for_older_transformers(tmp_path: Path) -> None:
    """A source keeps its fields, with a note if transformers 4 misreads them; the catalogue has those of both."""
    shape = CATALOG["llama31-tiny"].with_layers(1)
    for name in ("source", "catalogue"):
        save_model(tmp_path / name, shape)
    (tmp_path / "catalogue" / "config.json").write_bytes(config_text(shape))
    notes, content = {}, {}
    for name in ("source", "catalogue"):
        distributed.run(import_here, 1, tmp_path / name, tmp_path / f"{name}-ckpt", 1, 1)
        notes[name] = exported(tmp_path / f"{name}-ckpt", tmp_path / f"{name}-out")
        content[name] = json.loads((tmp_path / f"{name}-out" / "config.json").read_text())
    assert len(notes["source"]) == 1 and "Load the export with transformers 5" in notes["source"][0]
    assert "rope_theta" not in content["source"] and "torch_dtype" not in content["source"]
    assert notes["catalogue"] == () and content["catalogue"]["rope_theta"] == shape.rope_theta
    assert content["catalogue"]["dtype"] == content["catalogue"]["torch_dtype"] == "float32"
