"""Token files: megatron-core's IndexedDataset (.bin and .idx), opened as one memory-mapped stream.

Read without megatron-core, so that a run of another engine does not load it. tools/preprocess.py also leaves the
facts that only reading every token would tell, in a .json file; a token file made elsewhere is read through once.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from megabench.data import DataError

# megatron/core/datasets/indexed_dataset.py, _IndexWriter: magic, version, dtype code, sequences, documents + 1, then
# int32 lengths, int64 byte offsets and int64 document borders
_HEADER = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("num_sequences", "<u8"), ("num_borders", "<u8")]
)
_MAGIC = b"MMIDIDX"
_DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16
}  # fmt: skip
_SCAN_TOKENS = 1 << 23


class TokenFacts(BaseModel):
    """What reading every token of a file tells; `sha256` is that of the .bin file."""

    model_config = ConfigDict(extra="forbid")

    num_tokens: int
    max_token: int
    sha256: str


def token_file_prefix(path: Path) -> Path | None:
    """The prefix that `path` (the prefix itself, or its .bin or .idx file) names; None if it names no token file."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix if any(beside(prefix, suffix).exists() for suffix in (".bin", ".idx")) else None


def beside(prefix: Path, suffix: str) -> Path:
    """The file `prefix` + `suffix`; a dot in the prefix's own name stays. DataError for a prefix without a name."""
    if not prefix.name:
        raise DataError(f"'{prefix}' names no file; give the path of a file, or the prefix of a token file")
    return prefix.with_name(prefix.name + suffix)


def open_token_file(prefix: Path) -> NDArray[Any]:
    """All tokens as one flat memory-mapped array [num_tokens]; DataError when .bin and .idx are not a whole pair."""
    bin_path, idx_path = beside(prefix, ".bin"), beside(prefix, ".idx")
    for path, other in ((bin_path, idx_path), (idx_path, bin_path)):
        if not path.is_file():
            raise DataError(
                f"{other} is there but {path} is not; a token file needs both, make it with tools/preprocess.py"
            )
    dtype, num_tokens = _read_index(idx_path)
    expected = num_tokens * np.dtype(dtype).itemsize
    if bin_path.stat().st_size != expected:
        raise DataError(
            f"{bin_path} has {bin_path.stat().st_size} bytes where {idx_path.name} tells of {expected}; "
            f"make both again with tools/preprocess.py"
        )
    if num_tokens == 0:
        raise DataError(f"{bin_path} is empty; give a token file that holds tokens")
    return np.memmap(bin_path, dtype=dtype, mode="r")


def read_facts(prefix: Path, tokens: NDArray[Any]) -> TokenFacts:
    """The facts beside the token file if they are as new as it is, else found by reading it through."""
    path = beside(prefix, ".json")
    try:
        facts = TokenFacts.model_validate_json(path.read_bytes())
        is_current = path.stat().st_mtime >= beside(prefix, ".bin").stat().st_mtime
    except (OSError, ValidationError):
        return scan(tokens)
    return facts if is_current and facts.num_tokens == len(tokens) else scan(tokens)


def write_facts(prefix: Path, facts: TokenFacts) -> None:
    beside(prefix, ".json").write_text(json.dumps(facts.model_dump()) + "\n")


def scan(tokens: NDArray[Any]) -> TokenFacts:
    """Reads every token once, holding few of them at a time."""
    digest, max_token = hashlib.sha256(), 0
    for start in range(0, len(tokens), _SCAN_TOKENS):
        block = np.ascontiguousarray(tokens[start : start + _SCAN_TOKENS])
        digest.update(block.data)
        max_token = max(max_token, int(block.max()))
    return TokenFacts(num_tokens=len(tokens), max_token=max_token, sha256=digest.hexdigest())


def _read_index(path: Path) -> tuple[type[np.integer[Any]], int]:
    """The dtype and the number of tokens that an .idx file tells of."""
    damaged = DataError(f"{path} is damaged or no token index; make it again with tools/preprocess.py")
    size = path.stat().st_size
    if size < _HEADER.itemsize:
        raise damaged
    header = np.fromfile(path, dtype=_HEADER, count=1)[0]
    num_sequences, num_borders = int(header["num_sequences"]), int(header["num_borders"])
    if header["magic"] != _MAGIC or header["version"] != 1 or header["dtype"] not in _DTYPES:
        raise damaged
    if size != _HEADER.itemsize + num_sequences * (4 + 8) + num_borders * 8:
        raise damaged
    lengths = np.fromfile(path, dtype="<i4", count=num_sequences, offset=_HEADER.itemsize)
    if num_sequences and lengths.min() < 0:
        raise damaged
    return _DTYPES[int(header["dtype"])], int(lengths.sum(dtype=np.int64))
