"""Token files in the format of megatron-core's IndexedDataset (.bin and .idx), opened as one memory-mapped stream.

The reader does not import megatron-core, because runs of other engines do not need megatron-core. megabench preprocess
also writes a .json file with the token count, the largest token, the checksum and the tokenizer. If the .json file is
missing or does not describe the tokens, the reader computes its contents by reading all tokens once.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from megabench.data import DataError
from megabench.inputs import read_bytes
from megabench.record import TokenizerUsed

# The format of the .idx file is defined by _IndexWriter in megatron/core/datasets/indexed_dataset.py. The header has a
# magic string, version, dtype code, number of sequences, and number of documents + 1. The header is followed by int32
# sequence lengths, int64 byte offsets and int64 document boundaries.
_HEADER = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("num_sequences", "<u8"), ("num_borders", "<u8")]
)
_MAGIC = b"MMIDIDX"
_DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16
}  # fmt: skip
_SCAN_TOKENS = 1 << 23
_SAMPLES, _SAMPLE_TOKENS = 256, 1024


class TokenFacts(BaseModel):
    """Number of tokens and largest token id of a token file, and the SHA-256 hash of its .bin file.

    `sample_sha256` is the hash of a sample of the tokens, which shows that other tokens replaced the .bin file.
    `tokenizer` is None if another program wrote the file.
    """

    model_config = ConfigDict(extra="forbid")

    num_tokens: int
    max_token: int
    sha256: str
    sample_sha256: str
    tokenizer: TokenizerUsed | None = None


class IdRange(NamedTuple):
    """The largest token id of an array, and the position of its first token outside the vocabulary, if any."""

    max_token: int
    first_outside: int | None


def token_file_prefix(path: Path) -> Path | None:
    """Return the prefix of a token file, or None if no token file exists.

    `path` is the prefix itself, or the path of the .bin or .idx file.
    """
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix if any(beside(prefix, suffix).exists() for suffix in (".bin", ".idx")) else None


def beside(prefix: Path, suffix: str) -> Path:
    """Return the path `prefix` + `suffix`. A dot in the name of `prefix` does not start a suffix.

    Raises:
        DataError: The last component of `prefix` is empty.
    """
    if not prefix.name:
        raise DataError(f"'{prefix}' names a directory. Give the path of a file, or the prefix of a token file.")
    return prefix.with_name(prefix.name + suffix)


def open_token_file(prefix: Path) -> NDArray[Any]:
    """Return all tokens as a flat memory-mapped array [num_tokens].

    Raises:
        DataError: The .bin or .idx file is missing, damaged or empty, or the two files do not match.
    """
    bin_path, idx_path = beside(prefix, ".bin"), beside(prefix, ".idx")
    for path, other in ((bin_path, idx_path), (idx_path, bin_path)):
        if not path.is_file():
            raise DataError(f"{other} exists, but {path} does not. Create both files with megabench preprocess.")
    dtype, num_tokens = _read_index(idx_path)
    expected = num_tokens * np.dtype(dtype).itemsize
    if bin_path.stat().st_size != expected:
        raise DataError(
            f"{bin_path} has {bin_path.stat().st_size} bytes, but {idx_path.name} requires {expected}. "
            f"Create both files again with megabench preprocess."
        )
    if num_tokens == 0:
        raise DataError(f"{bin_path} is empty. Give a token file that contains tokens.")
    return np.memmap(bin_path, dtype=dtype, mode="r")


def read_facts(prefix: Path, tokens: NDArray[Any], max_token: int) -> TokenFacts:
    """Return the TokenFacts from the .json file of a token file, or compute the facts if that file is outdated.

    `max_token` is the largest token of the .bin file.
    """
    facts = recorded_facts(prefix)
    if not facts or (facts.num_tokens, facts.max_token) != (len(tokens), max_token):
        return scan(tokens)
    # a .bin file that was copied over the original may have an older time than the facts
    return facts if facts.sample_sha256 == _sample_sha256(tokens) else scan(tokens)


def _sample_sha256(tokens: NDArray[Any]) -> str:
    """Return the SHA-256 hash of the number of tokens and of blocks of tokens at regular distances."""
    digest = hashlib.sha256(str(len(tokens)).encode())
    for start in range(0, len(tokens), max(_SAMPLE_TOKENS, len(tokens) // _SAMPLES)):
        digest.update(tokens[start : start + _SAMPLE_TOKENS].tobytes())
    return digest.hexdigest()


def recorded_facts(prefix: Path) -> TokenFacts | None:
    """Return the TokenFacts from the .json file of a token file, or None if the .bin file is newer."""
    path = beside(prefix, ".json")
    try:
        facts = TokenFacts.model_validate_json(read_bytes(path))
        return facts if path.stat().st_mtime >= beside(prefix, ".bin").stat().st_mtime else None
    except (OSError, ValidationError):
        return None


def write_facts(prefix: Path, facts: TokenFacts) -> None:
    beside(prefix, ".json").write_text(json.dumps(facts.model_dump()) + "\n")


def scan(tokens: NDArray[Any]) -> TokenFacts:
    """Compute the TokenFacts of a token array in one pass, reading the tokens in blocks."""
    digest, max_token = hashlib.sha256(), 0
    for start in range(0, len(tokens), _SCAN_TOKENS):
        block = np.ascontiguousarray(tokens[start : start + _SCAN_TOKENS])
        digest.update(block.data)
        max_token = max(max_token, int(block.max()))
    return TokenFacts(
        num_tokens=len(tokens),
        max_token=max_token,
        sha256=digest.hexdigest(),
        sample_sha256=_sample_sha256(tokens),
    )


def id_range(tokens: NDArray[Any], vocab_size: int, share: int = 0, num_shares: int = 1) -> IdRange:
    """Return the IdRange of one of `num_shares` equal shares of `tokens`."""
    first, end = (len(tokens) * border // num_shares for border in (share, share + 1))
    max_token, first_outside = -1, None
    for start in range(first, end, _SCAN_TOKENS):
        block = tokens[start : min(start + _SCAN_TOKENS, end)]
        highest = int(block.max())
        max_token = max(max_token, highest)
        if first_outside is None and (highest >= vocab_size or (block.dtype.kind == "i" and block.min() < 0)):
            first_outside = start + int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
    return IdRange(max_token, first_outside)


def merged(shares: Iterable[IdRange]) -> IdRange:
    """Return the IdRange of all shares."""
    ranges = list(shares)
    outside = [each.first_outside for each in ranges if each.first_outside is not None]
    return IdRange(max(each.max_token for each in ranges), min(outside, default=None))


def _read_index(path: Path) -> tuple[type[np.integer[Any]], int]:
    """Return the dtype and the number of tokens according to an .idx file."""
    damaged = DataError(f"{path} is damaged or is not a token index. Create it again with megabench preprocess.")
    size = path.stat().st_size
    if size < _HEADER.itemsize:
        raise damaged
    header = np.fromfile(path, dtype=_HEADER, count=1)[0]
    num_sequences, num_borders = int(header["num_sequences"]), int(header["num_borders"])
    if header["magic"] != _MAGIC or header["version"] != 1 or header["dtype"] not in _DTYPES:
        raise damaged
    if size != _HEADER.itemsize + num_sequences * (4 + 8) + num_borders * 8:
        raise damaged
    dtype = _DTYPES[int(header["dtype"])]
    num_tokens = 0
    for start in range(0, num_sequences, _SCAN_TOKENS):
        count = min(_SCAN_TOKENS, num_sequences - start)
        lengths = np.fromfile(path, "<i4", count, offset=_HEADER.itemsize + start * 4)
        offsets = np.fromfile(path, "<i8", count, offset=_HEADER.itemsize + num_sequences * 4 + start * 8)
        ends = num_tokens + np.cumsum(lengths, dtype=np.int64)
        if lengths.min() < 0 or not np.array_equal(offsets, (ends - lengths) * np.dtype(dtype).itemsize):
            raise damaged
        num_tokens = int(ends[-1])
    borders = np.fromfile(path, "<i8", num_borders, offset=size - num_borders * 8)
    if num_borders and (borders[0] != 0 or borders[-1] > num_sequences or (np.diff(borders) < 0).any()):
        raise damaged
    return dtype, num_tokens
