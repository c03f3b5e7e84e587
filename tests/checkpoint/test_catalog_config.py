"""The config.json of a trained catalogue model fits the tokens and the sequences that it was trained on."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from megabench.checkpoint.assets import assets_of_run
from megabench.cli.preprocess import write_tokens
from megabench.config import RunConfig


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
