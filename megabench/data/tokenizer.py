"""Tokenizers: raw bytes, or a Hugging Face tokenizer."""

import hashlib
import json
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megabench.data import DataError
from megabench.data.text import TextPiece
from megabench.data.tokenizer_probe import PROBE
from megabench.inputs import LARGE, read_bytes, read_json
from megabench.models.find import ASSETS, is_directory
from megabench.models.hugging_face import TOKENIZER_CONFIG_NAME, own_code
from megabench.record import TokenizerUsed

BYTES = "bytes"
_TOKENIZER_JSON = "tokenizer.json"
_VOCABULARIES = {"vocab.json", "vocab.txt", "merges.txt", "tekken.json"}
_VOCABULARY_SUFFIXES = {".model", ".tiktoken"}  # sentencepiece, tiktoken
# The other parts of tokenizer.json (truncation, padding, special tokens around a text, decoding) are not used.
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")


class Tokenizer(Protocol):
    """A tokenizer. `end_of_document` is the id appended to each document, or None if the vocabulary has no such id.

    `vocab_size` is the largest id plus 1. `warning` is a sentence for the user, or None.
    """

    @property
    def used(self) -> TokenizerUsed: ...

    @property
    def warning(self) -> str | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int | None: ...

    def encode(self, piece: TextPiece) -> NDArray[Any]: ...


class ByteTokenizer:
    """Byte-level tokenizer for files in any encoding. Ids 0 to 255 are bytes, and id 256 ends a document."""

    vocab_size = 257
    end_of_document = 256
    warning = None
    used = TokenizerUsed(name=BYTES, sha256=hashlib.sha256(b"bytes").hexdigest(), num_tokens=vocab_size)

    def encode(self, piece: TextPiece) -> NDArray[np.uint8]:
        return np.frombuffer(piece.text, dtype=np.uint8)


class HuggingFaceTokenizer:
    """A tokenizer that transformers loads from a local directory, without network access.

    The eos token marks the end of a document. If the directory has a tokenizer.json, that file alone determines the
    tokens: transformers 5 replaces parts of the file by those of the class in tokenizer_config.json.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise DataError(
                f"tokenizer={directory} is not a directory. Use tokenizer=bytes, or the directory of a Hugging Face "
                f"tokenizer (hf download NAME --local-dir DIR)."
            )
        special = (path for path in directory.iterdir() if path.exists() and not path.is_file() and not path.is_dir())
        if pipe := next(special, None):  # transformers would wait for a named pipe
            raise DataError(f"tokenizer={directory} contains {pipe.name}, which is not a regular file. Remove it.")
        # imported here, because importing transformers takes seconds and tokenizer=bytes does not need transformers
        from tokenizers import Tokenizer as JsonTokenizer
        from transformers import AutoTokenizer

        file = directory / _TOKENIZER_JSON
        self._json: Any = None
        try:
            # without trust_remote_code=False, transformers asks on standard input whether to run the code
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            if file.exists():
                self._json = JsonTokenizer.from_file(str(file))
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
        self.end_of_document: int | None = self._tokenizer.eos_token_id
        self.warning: str | None = None
        if self._json:
            self._json.no_truncation()
            self._json.no_padding()
            eos = self._tokenizer.eos_token
            self.end_of_document = self._json.token_to_id(eos) if eos else None
            self.warning = self._difference(directory)
        # ids may have gaps, so that the number of tokens can be below the largest id
        self.vocab_size: int = max((self._json or self._tokenizer).get_vocab().values(), default=-1) + 1
        if not self.vocab_size:
            raise DataError(f"tokenizer={directory} has no tokens. Give a directory that `save_pretrained` wrote.")
        self.used = TokenizerUsed(
            name=str(directory), sha256=tokenizer_sha256(str(directory)), num_tokens=self.vocab_size
        )

    def _difference(self, directory: Path) -> str | None:
        """Return a warning if transformers splits a probe text unlike tokenizer.json."""
        known = [token for token in self._tokenizer.all_special_tokens if self._json.token_to_id(token) is not None]
        text = PROBE + " ".join(known)
        try:
            encoded = self._json.encode(text, add_special_tokens=False)
        except Exception:  # the vocabulary lacks a character of the probe, and a token for unknown ones
            return None
        try:
            theirs = self._ids_of_transformers(text)
        except Exception:
            theirs = []
        if encoded.ids == theirs:
            return None
        same = takewhile(lambda pair: pair[0] == pair[1], zip(encoded.ids, theirs, strict=False))
        first = min(sum(1 for _ in same), len(encoded.ids) - 1)
        piece = text[encoded.offsets[first][0] :][:16]
        return (
            f"transformers loads tokenizer={directory} as {type(self._tokenizer).__name__}, which splits {piece!r} "
            f"unlike tokenizer.json; megabench uses the tokens of tokenizer.json, which "
            f"PreTrainedTokenizerFast.from_pretrained also gives"
        )

    def _ids_of_transformers(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])

    def encode(self, piece: TextPiece) -> NDArray[np.int64]:
        try:
            text = piece.text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{piece.where} is not UTF-8 ({error.reason}), which a Hugging Face tokenizer requires. "
                f"Convert the file to UTF-8, or use tokenizer=bytes."
            ) from None
        # documents contain no BOS or EOS token but the one that `tokenize` appends
        try:
            ids = (
                self._json.encode(text, add_special_tokens=False).ids if self._json else self._ids_of_transformers(text)
            )
        except Exception as error:  # tokenizers raises Exception itself
            raise DataError(
                f"{piece.where} cannot be tokenized with tokenizer={self.used.name} ({error}). Use another tokenizer."
            ) from None
        return np.asarray(ids, dtype=np.int64)


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer `bytes`, or the Hugging Face tokenizer in the directory `name`.

    Raises:
        DataError: The directory does not contain a tokenizer that transformers can load.
    """
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(Path(name))


def default_tokenizer(model: str) -> str:
    """Return the tokenizer of a `--model` value: that of the model directory, or bytes for a model of the catalogue.

    Raises:
        DataError: The model directory contains no tokenizer.
    """
    if not is_directory(model):
        return BYTES
    for folder in (Path(model), Path(model, ASSETS)):
        if (folder / TOKENIZER_CONFIG_NAME).exists() or _vocabularies(folder):
            return str(folder)
    raise DataError(f"model={model} contains no tokenizer. Set tokenizer to a Hugging Face directory, or to bytes.")


def tokenizer_sha256(name: str) -> str:
    """Return the SHA-256 hash of what maps documents to token ids. Copies of a tokenizer have equal hashes.

    Raises:
        DataError: The tokenizer cannot be read.
    """
    if name == BYTES:
        return ByteTokenizer.used.sha256
    directory = Path(name)
    try:
        if not (directory / _TOKENIZER_JSON).exists():
            files = _vocabularies(directory) or [directory / TOKENIZER_CONFIG_NAME]
            return hashlib.sha256(b"".join(file.name.encode() + read_bytes(file, LARGE) for file in files)).hexdigest()
        content = read_json(directory / _TOKENIZER_JSON, LARGE)
        config = directory / TOKENIZER_CONFIG_NAME
        eos = read_json(config, LARGE).get("eos_token") if config.exists() else None  # a string or an object
        parts = {part: content.get(part) for part in _PARTS}
        parts |= {"eos": eos.get("content") if isinstance(eos, dict) else eos}
        # files of older and newer versions spell merges and unused options of the model differently
        model = {key: value for key, value in parts["model"].items() if value is not None and value is not False}
        if "merges" in model:
            model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        return hashlib.sha256(json.dumps(parts | {"model": model}, sort_keys=True).encode()).hexdigest()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"tokenizer={name} cannot be read ({error}). Give a directory with a tokenizer.") from None


def _vocabularies(directory: Path) -> list[Path]:
    """Return the files in `directory` that contain the vocabulary of a tokenizer, by name."""
    names = _VOCABULARIES | {_TOKENIZER_JSON}
    files = directory.iterdir() if directory.is_dir() else ()
    return sorted(file for file in files if file.name in names or file.suffix in _VOCABULARY_SUFFIXES)


def check_end_of_document(tokenizer: Tokenizer, remedy: str) -> None:
    """Raise DataError if the tokenizer has no token that separates documents. `remedy` says how to train without."""
    if tokenizer.end_of_document is None:
        raise DataError(
            f"tokenizer={tokenizer.used.name} has no eos_token with an id, so nothing would separate documents. Set "
            f"eos_token in {TOKENIZER_CONFIG_NAME} to a token of the vocabulary, or {remedy}."
        )


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the dtype of tokens in memory and on disk, by the rule of megatron-core (`DType.optimal_dtype`)."""
    return np.uint16 if vocab_size < 65500 else np.int32


def tokenize(piece: TextPiece, tokenizer: Tokenizer, append_eod: bool = True) -> NDArray[Any]:
    """Return the token ids of `piece` in `token_dtype`. Append the end-of-document id if `piece` ends a document."""
    tokens = tokenizer.encode(piece).astype(token_dtype(tokenizer.vocab_size))
    if append_eod and piece.ends_document:
        return np.append(tokens, tokens.dtype.type(tokenizer.end_of_document))
    return tokens
