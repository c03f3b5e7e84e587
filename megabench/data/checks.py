"""Checks of the tokenizer and the tokens of a run. Loads no torch, so that they can precede the start of processes."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from megabench.config import ResolvedConfig, RunConfig
from megabench.data import DataError
from megabench.data.text import is_text_file
from megabench.data.token_file import IdRange, id_range, merged, open_token_file, recorded_facts, token_file_prefix
from megabench.data.tokenizer import (
    Tokenizer,
    check_end_of_document,
    default_tokenizer,
    open_tokenizer,
    tokenizer_sha256,
)
from megabench.models.find import is_directory
from megabench.record import TokenizerUsed

SYNTHETIC = "synthetic"
STDLIB = "stdlib"


def check_before_start(config: ResolvedConfig) -> None:
    """Check what can be checked without tokenizing a text. The ranks check everything again when they open the data.

    Raises:
        DataError: The tokenizer or the token file cannot be used.
    """
    path = Path(config.data)
    if config.data == STDLIB or is_text_file(path):
        tokenizer_of(config)
    elif prefix := token_file_prefix(path):
        tokens, num_threads = open_token_file(prefix), os.cpu_count() or 1
        share = partial(id_range, tokens, config.shape.vocab_size, num_shares=num_threads)
        with ThreadPoolExecutor(num_threads) as pool:
            check_tokens(config, tokens, merged(pool.map(share, range(num_threads))))
        if facts := recorded_facts(prefix):
            check_recorded(config.data, facts.tokenizer, config)


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """Open the tokenizer for the text of a run, and check that it can separate documents.

    Raises:
        DataError: The tokenizer cannot be loaded, or neither `config` nor the model directory names one.
    """
    tokenizer = open_tokenizer(config.tokenizer or default_tokenizer(config.model))
    check_end_of_document(tokenizer, "train on a token file that megabench preprocess --no-append-eod wrote")
    return tokenizer


def check_tokens(config: ResolvedConfig, tokens: NDArray[Any], ids: IdRange) -> None:
    """Raise DataError if there are too few tokens, or tokens outside the vocabulary of the model."""
    if len(tokens) <= config.seq_length:
        shorter = f", or set seq_length to {len(tokens) - 1} or less" if len(tokens) > 1 else ""
        raise DataError(
            f"data={config.data} has {len(tokens)} tokens, too few for one sequence of {config.seq_length} "
            f"inputs and one more label. Use more text{shorter}."
        )
    if ids.first_outside is not None:
        raise DataError(
            f"data={config.data} contains token {tokens[ids.first_outside]}, but {config.model} has a vocabulary of "
            f"{config.shape.vocab_size} tokens (0 to {config.shape.vocab_size - 1}). The first such token is number "
            f"{ids.first_outside:,} of the data, counted from 0. Use the tokenizer of the model, or a model with a "
            f"larger vocabulary."
        )


def check_recorded(data: str, recorded: TokenizerUsed | None, run: RunConfig) -> None:
    """Raise DataError if a token file names another tokenizer than the run: that of the setting or of the model."""
    if recorded is None or not (run.tokenizer or is_directory(run.model)):
        return
    try:
        name = run.tokenizer or default_tokenizer(run.model)
    except DataError:
        return
    if (sha256 := tokenizer_sha256(name)) != recorded.sha256:
        raise DataError(
            f"data={data} was made with tokenizer {recorded}, but the tokenizer of the run is {name} (sha256 "
            f"{sha256[:12]}). Tokenize the text with megabench preprocess --tokenizer {name}, or set tokenizer to "
            f"that of the data."
        )
