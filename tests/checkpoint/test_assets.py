"""The model files of a checkpoint: those that its manifest lists, and the config.json of a catalogue model.

The config.json fits the tokens and the sequences that the model was trained on.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.assets import assets_of_run, listed_assets
from megabench.checkpoint.files import write_assets
from megabench.checkpoint.manifest import FileEntry
from megabench.checkpoint.weights_only import weights_manifest
from megabench.cli.preprocess import write_tokens
from megabench.config import RunConfig
from megabench.models.catalog import get_model
from megabench.models.hugging_face import config_text
from tests.engines.equivalence import resolve
from tests.models.tiny import CATALOG, save_model

FILES = {"config.json": config_text(get_model("llama-tiny")), "spiece.model": b"s", "templates/a/tool.jinja": b"t"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without tensors."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weights_manifest(get_model("llama-tiny"), write_assets(folder, FILES)).write(folder)
    return folder


def fail(text: str) -> None:
    raise AssertionError(text)


def test_only_listed_files(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "private").write_text("secret")
    (folder / "hugging_face" / "vocab.txt").symlink_to(tmp_path / "private")
    (folder / "hugging_face" / "tokenizer.json").write_text("{}")
    assert listed_assets(folder) == FILES
    run = resolve(1, model=str(folder), num_layers=None)
    assert assets_of_run(run, fail) == FILES
    run = resolve(1, model=str(folder), num_layers=None, tokenizer=str(folder / "hugging_face"))
    assert assets_of_run(run, fail) == FILES


@pytest.mark.parametrize("how", ["link", "content", "pipe", "gone"])
def test_damaged_files(tmp_path: Path, folder: Path, how: str) -> None:
    path = folder / "hugging_face" / "spiece.model"
    path.unlink()
    (tmp_path / "private").write_text("s")
    if how == "link":
        path.symlink_to(tmp_path / "private")
    elif how == "content":
        path.write_text("x")
    elif how == "pipe":
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"is damaged: hugging_face/spiece\.model .*Use another checkpoint\.$"):
        listed_assets(folder)


def test_another_tokenizer_replaces_all_files_of_the_first(tmp_path: Path, tokenizer_dir: Path) -> None:
    save_model(tmp_path / "model", CATALOG["llama-tiny"].with_layers(1))
    for name in ("spiece.model", "vocab.txt", "README.md"):
        (tmp_path / "model" / name).write_text(name)
    shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "README.md").write_text("of the tokenizer")
    run = resolve(1, model=str(tmp_path / "model"), num_layers=None, tokenizer=str(tmp_path / "tokenizer"))
    found = assets_of_run(run, fail)
    assert found.keys() == {"config.json", "generation_config.json", "README.md"} | set(os.listdir(tokenizer_dir))
    assert found["README.md"] == b"README.md"


def test_names_stay_below_the_folder() -> None:
    for name in ("a", "a/b.jinja", "a/b/c/d.txt", "使用 说明.md", "a..b"):
        assert FileEntry(name=f"hugging_face/{name}", num_bytes=0, crc32=0)
    for name in (
        *("/etc/passwd", "../a", "a/b", "hugging_face/../a", "hugging_face/a/../../b", "hugging_face/.a"),
        *("hugging_face/a/.b", "hugging_face//a", "hugging_face/a/", "hugging_face/a\n", "hugging_face/a/b/c/d/e"),
        *("hugging_face/a\\b", "hugging_face/" + "a" * 200),
    ):
        with pytest.raises(ValidationError):
            FileEntry(name=name, num_bytes=0, crc32=0)


def config_of(folder: Path, **fields: Any) -> Any:
    """What transformers reads in the config.json of a run."""
    run = RunConfig.parse({"model": "llama-tiny", "device": "cpu"} | fields).resolve(1, "cpu")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(assets_of_run(run, print)["config.json"])
    return AutoConfig.from_pretrained(folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A tokenizer without BOS, whose EOS is not that of Llama."""
    vocabulary = {f"word{number}": number for number in range(7)} | {"<end>": 7}
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "word0")), eos_token="<end>")
    fast.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_special_tokens_are_those_of_the_data(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "text.txt").write_text("some text")
    write_tokens([tmp_path / "text.txt"], tmp_path / "bytes", "bytes", 1, True)
    for fields, expected in (
        ({"data": "stdlib"}, 256),
        ({"data": "synthetic"}, None),
        ({"data": "stdlib", "tokenizer": tokenizer}, 7),
        ({"data": "some/prefix", "tokenizer": tokenizer}, 7),
        ({"data": "some/prefix"}, None),
        ({"data": str(tmp_path / "bytes")}, 256),
    ):
        config = config_of(tmp_path / "out", **fields)
        assert (config.bos_token_id, config.eos_token_id) == (None, expected), fields


@pytest.mark.parametrize(("seq_length", "expected"), [(32, 256), (600, 600)])
def test_positions_of_the_longest_training_sequence(tmp_path: Path, seq_length: int, expected: int) -> None:
    assert config_of(tmp_path / "out", seq_length=seq_length).max_position_embeddings == expected


def test_learned_positions_stay(tmp_path: Path) -> None:
    config = config_of(tmp_path / "out", model="gpt2-tiny", engine="ddp", seq_length=32)
    assert (
        config.n_positions
        == RunConfig.parse({"model": "gpt2-tiny", "engine": "ddp"}).resolve(1, "cpu").shape.num_positions
    )
