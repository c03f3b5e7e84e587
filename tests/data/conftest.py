"""Fixtures of the data tests: configurations, text files, a tokenizer directory."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megabench.config import ResolvedConfig, RunConfig
from megabench.data.text import read_stdlib

DOCUMENTS = ["The first document.\nIt has two lines.\n", "", "Größe, naïveté and 中文.", "last " * 200]


@pytest.fixture
def resolve() -> Callable[..., ResolvedConfig]:
    """A resolved llama-tiny run; keyword arguments override its fields."""

    def make(world_size: int = 1, **fields: Any) -> ResolvedConfig:
        settings = {"model": "llama-tiny", "seq_length": 16, "micro_batch": 1, "global_batch": 8}
        return RunConfig.parse(settings | fields).resolve(world_size, "cpu")

    return make


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """DOCUMENTS, one a line."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(DOCUMENTS)))
    return path


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 tokens, trained on some of the standard library, as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((piece.text.decode() for piece in islice(read_stdlib(), 20)), trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory
