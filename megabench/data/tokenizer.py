"""Text to token ids: raw bytes, or a Hugging Face tokenizer."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megabench.data import DataError
from megabench.data.text import Piece
from megabench.models.hugging_face import own_code

BYTES = "bytes"


class Tokenizer(Protocol):
    """`end_of_document` is the id put behind each document, None where the vocabulary has none."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int | None: ...

    def encode(self, piece: Piece) -> NDArray[Any]: ...


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a document. Takes any file, UTF-8 or not."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, piece: Piece) -> NDArray[np.uint8]:
        return np.frombuffer(piece.text, dtype=np.uint8)


class HuggingFaceTokenizer:
    """A tokenizer directory as transformers saves it, read from disk alone; eos ends a document."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise DataError(
                f"tokenizer={directory} is not a directory; use bytes or a Hugging Face tokenizer directory"
            )
        from transformers import AutoTokenizer  # here, because it takes seconds that bytes need not pay

        try:
            # without a value for trust_remote_code, transformers asks on standard input, and runs the code on a "y"
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its parsers do
            if "trust_remote_code" in str(error) and (code := own_code(directory)):
                raise DataError(
                    f"tokenizer={directory} needs its own Python code ({code}), which megabench does not run. Use a "
                    f"tokenizer that transformers supports without it."
                ) from None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" :")
            raise DataError(
                f"tokenizer={directory} holds no tokenizer that transformers can load ({reason}); give a directory "
                f"that `save_pretrained` wrote"
            ) from None
        self.vocab_size: int = len(self._tokenizer)
        self.end_of_document: int | None = self._tokenizer.eos_token_id

    def encode(self, piece: Piece) -> NDArray[np.int64]:
        try:
            text = piece.text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{piece.where} is not UTF-8 ({error.reason}), which a Hugging Face tokenizer needs; "
                f"convert it, or use tokenizer=bytes"
            ) from None
        encoded = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return np.asarray(encoded["input_ids"], dtype=np.int64)


def open_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the Hugging Face tokenizer in the directory `name`; DataError when there is none."""
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(Path(name))


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The dtype tokens are kept in, in memory and on disk: megatron-core's rule (`DType.optimal_dtype`)."""
    return np.uint16 if vocab_size < 65500 else np.int32


def tokenize(piece: Piece, tokenizer: Tokenizer, append_eod: bool = True) -> NDArray[Any]:
    """The ids of `piece` in `token_dtype`, closed by the end-of-document id where it ends a document."""
    tokens = tokenizer.encode(piece).astype(token_dtype(tokenizer.vocab_size))
    if append_eod and piece.ends_document and tokenizer.end_of_document is not None:
        return np.append(tokens, tokens.dtype.type(tokenizer.end_of_document))
    return tokens
