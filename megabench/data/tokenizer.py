"""Tokenizers: raw bytes, or a Hugging Face tokenizer."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megabench.data import DataError
from megabench.data.text import Piece
from megabench.models.hugging_face import own_code

BYTES = "bytes"


class Tokenizer(Protocol):
    """A tokenizer. `end_of_document` is the id appended to each document, or None if the vocabulary has no such id."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int | None: ...

    def encode(self, piece: Piece) -> NDArray[Any]: ...


class ByteTokenizer:
    """Byte-level tokenizer for files in any encoding. Ids 0 to 255 are bytes, and id 256 ends a document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, piece: Piece) -> NDArray[np.uint8]:
        return np.frombuffer(piece.text, dtype=np.uint8)


class HuggingFaceTokenizer:
    """A tokenizer that transformers loads from a local directory, without network access.

    The eos token marks the end of a document.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise DataError(
                f"tokenizer={directory} is not a directory. Use bytes or a Hugging Face tokenizer directory."
            )
        # imported here, because importing transformers takes seconds and tokenizer=bytes does not need transformers
        from transformers import AutoTokenizer

        try:
            # without trust_remote_code=False, transformers asks on standard input whether to run the code
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers passes on exceptions of any type from its parsers
            if "trust_remote_code" in str(error) and (code := own_code(directory)):
                raise DataError(
                    f"tokenizer={directory} needs its own Python code ({code}), which megabench does not run. Use a "
                    f"tokenizer that transformers supports without it."
                ) from None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" :")
            raise DataError(
                f"tokenizer={directory} contains no tokenizer that transformers can load ({reason}). Give a "
                f"directory that `save_pretrained` wrote."
            ) from None
        self.vocab_size: int = len(self._tokenizer)
        self.end_of_document: int | None = self._tokenizer.eos_token_id

    def encode(self, piece: Piece) -> NDArray[np.int64]:
        try:
            text = piece.text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{piece.where} is not UTF-8 ({error.reason}), which a Hugging Face tokenizer requires. "
                f"Convert the file to UTF-8, or use tokenizer=bytes."
            ) from None
        encoded = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return np.asarray(encoded["input_ids"], dtype=np.int64)


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer `bytes`, or the Hugging Face tokenizer in the directory `name`.

    Raises:
        DataError: The directory does not contain a tokenizer that transformers can load.
    """
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(Path(name))


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the dtype of tokens in memory and on disk, by the rule of megatron-core (`DType.optimal_dtype`)."""
    return np.uint16 if vocab_size < 65500 else np.int32


def tokenize(piece: Piece, tokenizer: Tokenizer, append_eod: bool = True) -> NDArray[Any]:
    """Return the token ids of `piece` in `token_dtype`. Append the end-of-document id if `piece` ends a document."""
    tokens = tokenizer.encode(piece).astype(token_dtype(tokenizer.vocab_size))
    if append_eod and piece.ends_document and tokenizer.end_of_document is not None:
        return np.append(tokens, tokens.dtype.type(tokenizer.end_of_document))
    return tokens
