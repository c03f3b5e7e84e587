"""Fixtures of the data tests: configurations and text files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megabench.config import ResolvedConfig, RunConfig
from megabench.data.source import Corpus, open_source

DOCUMENTS = ["The first document.\nIt has two lines.\n", "", "Größe, naïveté and 中文.", "last " * 200]


@pytest.fixture
def resolve() -> Callable[..., ResolvedConfig]:
    """A resolved llama-tiny run; keyword arguments override its fields."""

    def make(world_size: int = 1, **fields: Any) -> ResolvedConfig:
        settings = {"model": "llama-tiny", "seq_length": 16, "micro_batch": 1, "global_batch": 8}
        return RunConfig.parse(settings | fields).resolve(world_size, "cpu")

    return make


def open_corpus(config: ResolvedConfig) -> Corpus:
    """The tokens of a text or token file."""
    source = open_source(config)
    assert isinstance(source, Corpus)
    return source


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """DOCUMENTS, one a line."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(DOCUMENTS)))
    return path
