"""Token sources: indexed sequences of tokens, equal for all layouts, engines and ranks."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.data import DataError
from megabench.data.text import Piece, check_text_file, is_text_file, read_stdlib, read_text
from megabench.data.token_file import TokenFacts, open_token_file, read_facts, scan, token_file_prefix
from megabench.data.tokenizer import open_tokenizer, token_dtype, tokenize

MAX_TEXT_BYTES = 1 << 30  # size limit of a text file, because every rank keeps all tokens of the file in memory


class TokenSource(Protocol):
    """A source of indexed token sequences. The record of a run contains `name` and `sha256`."""

    @property
    def name(self) -> str: ...

    @property
    def sha256(self) -> str: ...

    def sequence(self, index: int) -> Tensor:
        """Return the tokens of sequence `index`, int64 [S+1].

        The result depends only on the data, the seed and `index`. Sequence indices have no upper limit.
        """
        ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """A stream of tokens, split into windows of S+1 tokens that overlap by one token and are shuffled each epoch."""

    name: str
    tokens: NDArray[Any]
    sha256: str
    seq_length: int
    seed: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_windows(self) -> int:
        """Number of windows in one epoch. Tokens after the last full window are dropped."""
        return (self.num_tokens - 1) // self.seq_length

    def sequence(self, index: int) -> Tensor:
        epoch, position = divmod(index, self.num_windows)
        start = int(window_order(self.seed, epoch, self.num_windows)[position]) * self.seq_length
        return torch.from_numpy(self.tokens[start : start + self.seq_length + 1].astype(np.int64))


@dataclass(frozen=True)
class Synthetic:
    """Random tokens, uniformly distributed over the vocabulary."""

    vocab_size: int
    seq_length: int
    seed: int
    name: str = "synthetic"

    @property
    def sha256(self) -> str:
        """The SHA-256 hash of the vocabulary size, sequence length and seed, which determine all tokens."""
        return hashlib.sha256(f"synthetic {self.vocab_size} {self.seq_length} {self.seed}".encode()).hexdigest()

    def sequence(self, index: int) -> Tensor:
        generator = np.random.Generator(np.random.PCG64([self.seed, index]))
        return torch.from_numpy(generator.integers(self.vocab_size, size=self.seq_length + 1, dtype=np.int64))


@lru_cache(maxsize=2)  # a global batch may contain sequences of two epochs
def window_order(seed: int, epoch: int, num_windows: int) -> NDArray[np.int64]:
    """Return the random order of the windows in `epoch`, int64 [num_windows]."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_windows)


def open_source(config: ResolvedConfig) -> TokenSource:
    """Open the token source that `config.data` specifies.

    Raises:
        DataError: The data cannot be read, is too short, or has tokens outside the vocabulary of the model.
    """
    seed = config.seed if config.data_seed is None else config.data_seed
    if config.data == "synthetic":
        return Synthetic(config.shape.vocab_size, config.seq_length, seed)
    name, tokens, facts = _load(config.data, config.tokenizer)
    if facts.num_tokens <= config.seq_length:
        shorter = f", or set seq_length to {facts.num_tokens - 1} or less" if facts.num_tokens > 1 else ""
        raise DataError(
            f"data={config.data} has {facts.num_tokens} tokens, too few for one sequence of {config.seq_length} "
            f"inputs and one more label. Use more text{shorter}."
        )
    if facts.max_token >= config.shape.vocab_size:
        raise DataError(
            f"data={config.data} contains token {facts.max_token}, but {config.model} has a vocabulary of "
            f"{config.shape.vocab_size} tokens (0 to {config.shape.vocab_size - 1}). Use the tokenizer of "
            f"the model, or a model with a larger vocabulary."
        )
    return Corpus(name, tokens, facts.sha256, config.seq_length, seed)


def _load(data: str, tokenizer: str) -> tuple[str, NDArray[Any], TokenFacts]:
    """Return the name of the data in the record, all tokens, and their TokenFacts.

    Raises:
        DataError: The data cannot be read.
    """
    path = Path(data)
    if data == "stdlib":
        tokens = _tokenize_all(read_stdlib(), tokenizer)
    elif is_text_file(path):
        check_text_file(path)
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise DataError(
                f"{path} is {path.stat().st_size / 2**30:.1f} GiB of text, too much to tokenize on every rank. Convert "
                f"the text to a token file with megabench preprocess, and give the prefix of the token file."
            )
        tokens = _tokenize_all(read_text(path), tokenizer)
    elif prefix := token_file_prefix(path):
        tokens = open_token_file(prefix)
        return prefix.name, tokens, read_facts(prefix, tokens)
    else:
        what = (
            "is a directory" if path.is_dir() else "has an unsupported file type" if path.exists() else "does not exist"
        )
        raise DataError(
            f"data={data} {what}. Use stdlib, synthetic, a .txt, .jsonl or .parquet file, or the prefix of a token "
            f"file made with megabench preprocess."
        )
    return path.name, tokens, scan(tokens)


def _tokenize_all(pieces: Iterator[Piece], tokenizer_name: str) -> NDArray[Any]:
    """Tokenize all pieces into one array [num_tokens], without creating a Python object per token or document."""
    tokenizer = open_tokenizer(tokenizer_name)
    tokens = bytearray()
    for piece in pieces:
        tokens += tokenize(piece, tokenizer).tobytes()
    return np.frombuffer(tokens, dtype=token_dtype(tokenizer.vocab_size))
