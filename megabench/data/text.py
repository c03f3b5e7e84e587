"""Text readers: what is in .txt, .jsonl and .parquet files and in the Python standard library, piece by piece."""

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megabench.data import DataError

PIECE_BYTES = 1 << 20  # long documents are handed on in pieces, so that memory stays flat
# some distributions drop the tests of the standard library; the others are not part of it
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one that starts and ends at line borders.

    `text` is UTF-8, save for .txt and .py files that are not; `where` names its place for messages; `input_bytes` is
    the share of the input file that it stands for, for progress.
    """

    text: bytes
    where: str
    ends_document: bool
    input_bytes: float


def read_text(path: Path) -> Iterator[Piece]:
    """The pieces of a text file; DataError when it cannot be read. A .txt file is one document."""
    check_text_file(path)
    return _READERS[path.suffix](path)


def check_text_file(path: Path) -> None:
    """DataError unless `path` is a readable text file that is not empty, of a kind that has a reader."""
    if path.is_dir():
        raise DataError(f"{path} is a directory; give one .txt, .jsonl or .parquet file, or the prefix of a token file")
    if not path.exists():
        raise DataError(f"{path} does not exist; give a .txt, .jsonl or .parquet file")
    if path.suffix not in _READERS:
        raise DataError(f"{path} is of an unknown kind; text is read from .txt, .jsonl and .parquet files")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} cannot be read: permission denied")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; give a file that holds text")


def is_text_file(path: Path) -> bool:
    """Whether the suffix names a kind of text file that has a reader."""
    return path.suffix in _READERS


def read_stdlib() -> Iterator[Piece]:
    """The sources of this machine's Python standard library, a document each, sorted by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB]  # os.walk does not enter the others
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        text = path.read_bytes()
        yield Piece(text, where=str(path), ends_document=True, input_bytes=len(text))


def _read_txt(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        text = b"".join(file.readlines(PIECE_BYTES))
        while text:
            following = b"".join(file.readlines(PIECE_BYTES))
            yield Piece(text, where=str(path), ends_document=not following, input_bytes=len(text))
            text = following


def _read_jsonl(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON: {error}; each line holds one object with a text field") from None
            text = fields.get("text") if isinstance(fields, dict) else None
            yield Piece(_encoded(text, where), where, ends_document=True, input_bytes=len(line))


def _read_parquet(path: Path) -> Iterator[Piece]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path} needs pyarrow; run `pip install pyarrow`, or give a .txt or .jsonl file") from None
    try:
        with ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if "text" not in columns:
                raise DataError(f"{path} has no column called text, only {', '.join(columns) or 'none'}; rename one")
            row_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=["text"]):
                for text in batch.column("text").to_pylist():
                    number += 1
                    where = f"{path} row {number}"
                    yield Piece(_encoded(text, where), where, ends_document=True, input_bytes=row_bytes)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _encoded(text: object, where: str) -> bytes:
    if not isinstance(text, str):
        raise DataError(f"{where} has no text: the field text must be there and hold a string")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds text that is not valid Unicode: {error.reason}") from None


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
