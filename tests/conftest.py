"""Fixtures that several rooms share."""

import gc
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from megabench.data.text import read_stdlib
from tools.planner_validation.own import measured_studies

# The processes that tests start import tests and tools. A command that a test calls sets PYTHONSAFEPATH for the tests
# that follow, so that the working directory alone does not suffice.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def collecting_garbage() -> Iterator[None]:
    """A command that a test calls in its own process stops the collection of garbage, or freezes what exists."""
    yield
    gc.enable()
    gc.unfreeze()


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


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of the studies in benchmarks/ by name."""
    return measured_studies(Path(__file__).parents[1] / "benchmarks", tmp_path_factory.mktemp("more-studies"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with whole commands come first: they take longest, and two workers shall end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("e2e")}
    items.sort(key=lambda item: item.path not in slow)
