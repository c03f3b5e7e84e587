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
from megabench.data.checks import STDLIB, SYNTHETIC, check_recorded, check_tokens, tokenizer_of
from megabench.data.text import TextPiece, check_text_file, is_text_file, read_stdlib, read_text
from megabench.data.token_file import IdRange, id_range, merged, open_token_file, read_facts, scan, token_file_prefix
from megabench.data.tokenizer import BYTES, Tokenizer, token_dtype, tokenize
from megabench.record import TokenizerUsed
from megabench.runtime.messages import gathered
from megabench.runtime.rendezvous import Rendezvous

MAX_TEXT_BYTES = 1 << 30  # size limit of a text file, because every rank keeps all tokens of the file in memory


class TokenSource(Protocol):
    """A source of indexed token sequences. The record of a run contains `name`, `sha256`, `tokenizer` and `warnings`.

    `tokenizer` is None if it is not known.
    """

    @property
    def name(self) -> str: ...

    @property
    def sha256(self) -> str: ...

    @property
    def tokenizer(self) -> TokenizerUsed | None: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def sequence(self, index: int) -> Tensor:
        """Return the tokens of sequence `index`, int64 [S+1].

        The result depends only on the data, the seed and `index`. Sequence indices have no upper limit.
        """
        ...

    def place(self, index: int) -> str:
        """Return the location of sequence `index` in the data, for error messages."""
        ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """A stream of tokens, split into windows of S+1 tokens that overlap by one token and are shuffled each epoch."""

    name: str
    tokens: NDArray[Any]
    sha256: str
    seq_length: int
    seed: int
    tokenizer: TokenizerUsed | None = None
    warnings: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_windows(self) -> int:
        """Number of windows in one epoch. Tokens after the last full window are dropped."""
        return (self.num_tokens - 1) // self.seq_length

    def _start(self, index: int) -> int:
        epoch, position = divmod(index, self.num_windows)
        return int(window_order(self.seed, epoch, self.num_windows)[position]) * self.seq_length

    def place(self, index: int) -> str:
        start = self._start(index)
        return f"tokens {start:,} to {start + self.seq_length:,}"

    def sequence(self, index: int) -> Tensor:
        start = self._start(index)
        return torch.from_numpy(self.tokens[start : start + self.seq_length + 1].astype(np.int64))


@dataclass(frozen=True)
class Synthetic:
    """Random tokens, uniformly distributed over the vocabulary."""

    vocab_size: int
    seq_length: int
    seed: int
    name: str = SYNTHETIC
    tokenizer: TokenizerUsed | None = None
    warnings: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """The SHA-256 hash of the vocabulary size, sequence length and seed, which determine all tokens."""
        return hashlib.sha256(f"synthetic {self.vocab_size} {self.seq_length} {self.seed}".encode()).hexdigest()

    def sequence(self, index: int) -> Tensor:
        generator = np.random.Generator(np.random.PCG64([self.seed, index]))
        return torch.from_numpy(generator.integers(self.vocab_size, size=self.seq_length + 1, dtype=np.int64))

    def place(self, index: int) -> str:
        return f"sequence {index:,}"


@lru_cache(maxsize=2)  # a global batch may contain sequences of two epochs
def window_order(seed: int, epoch: int, num_windows: int) -> NDArray[np.int64]:
    """Return the random order of the windows in `epoch`, int64 [num_windows]."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_windows)


def open_source(config: ResolvedConfig, rendezvous: Rendezvous | None = None) -> TokenSource:
    """Open the token source that `config.data` specifies.

    With `rendezvous`, every rank must call this, and the ranks share the check of a token file.

    Raises:
        DataError: The data cannot be read, is too short, has tokens outside the vocabulary of the model, or was made
            with another tokenizer.
    """
    seed = config.seed if config.data_seed is None else config.data_seed
    if config.data == SYNTHETIC:
        return Synthetic(config.shape.vocab_size, config.seq_length, seed)
    path = Path(config.data)
    used: TokenizerUsed | None
    if config.data == STDLIB or is_text_file(path):
        tokenizer = tokenizer_of(config)
        tokens = _read_tokens(config.data, tokenizer)
        check_tokens(config, tokens, id_range(tokens, config.shape.vocab_size))
        sha256, used, warnings = scan(tokens).sha256, tokenizer.used, _warnings(config, tokenizer)
    elif prefix := token_file_prefix(path):
        path, tokens, warnings = prefix, open_token_file(prefix), ()
        ids = _id_range_of_ranks(tokens, config.shape.vocab_size, rendezvous)
        check_tokens(config, tokens, ids)
        facts = read_facts(prefix, tokens, ids.max_token)
        check_recorded(config.data, facts.tokenizer, config)
        sha256, used = facts.sha256, facts.tokenizer
    else:
        what = (
            "is a directory" if path.is_dir() else "has an unsupported file type" if path.exists() else "does not exist"
        )
        raise DataError(
            f"data={config.data} {what}. Use stdlib, synthetic, a .txt, .jsonl or .parquet file, or the prefix of a "
            f"token file made with megabench preprocess."
        )
    return Corpus(path.name, tokens, sha256, config.seq_length, seed, used, warnings)


def _warnings(config: ResolvedConfig, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return what the user should know about the tokenizer of a text."""
    unused = tokenizer.used.name == BYTES and config.shape.vocab_size > 2 * tokenizer.vocab_size
    if config.tokenizer is None and unused and config.data != STDLIB:
        return (
            f"tokenizer=bytes, the default of {config.model}, uses {tokenizer.vocab_size} of the model's "
            f"{config.shape.vocab_size:,} tokens; set tokenizer to a Hugging Face directory to use more",
        )
    return (tokenizer.warning,) if tokenizer.warning else ()


def _id_range_of_ranks(tokens: NDArray[Any], vocab_size: int, rendezvous: Rendezvous | None) -> IdRange:
    """Return the IdRange of all tokens. Each rank reads an equal share of the tokens."""
    if rendezvous is None:
        return id_range(tokens, vocab_size)
    rank, world_size = rendezvous.rank, rendezvous.world_size
    share = id_range(tokens, vocab_size, rank, world_size)
    return merged(IdRange(*each) for each in gathered(rendezvous.store, rank, world_size, "ids", share))


def _read_tokens(data: str, tokenizer: Tokenizer) -> NDArray[Any]:
    """Return all tokens of a text.

    Raises:
        DataError: The text cannot be read.
    """
    if data == STDLIB:
        return _tokenize_all(read_stdlib(), tokenizer)
    path = Path(data)
    check_text_file(path)
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise DataError(
            f"{path} is {path.stat().st_size / 2**30:.1f} GiB of text, too much to tokenize on every rank. Convert "
            f"the text to a token file with megabench preprocess, and give the prefix of the token file."
        )
    return _tokenize_all(read_text(path), tokenizer)


def _tokenize_all(pieces: Iterator[TextPiece], tokenizer: Tokenizer) -> NDArray[Any]:
    """Tokenize all pieces into one array [num_tokens], without creating a Python object per token or document."""
    tokens = bytearray()
    for piece in pieces:
        tokens += tokenize(piece, tokenizer).tobytes()
    return np.frombuffer(tokens, dtype=token_dtype(tokenizer.vocab_size))
