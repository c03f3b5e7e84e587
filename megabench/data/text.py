"""Readers for .txt, .jsonl and .parquet files and for the source files of the Python standard library."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megabench.data import DataError
from megabench.inputs import parse_json

PIECE_BYTES = 1 << 20  # approximate size of the pieces in which a .txt file is read, to limit memory use
# directories to skip: test directories, which some Python distributions omit, and directories of other packages
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class TextPiece:
    """A document, or a part of a document that starts and ends at line boundaries.

    `text` is UTF-8, except in pieces of .txt and .py files with another encoding. `where` is the location of the piece
    for error messages. `input_bytes` is the number of bytes of the input file that the piece represents, for progress.
    """

    text: bytes
    where: str
    ends_document: bool
    input_bytes: float


def read_text(path: Path) -> Iterator[TextPiece]:
    """Return an iterator over the pieces of a text file. A .txt file is one document.

    Raises:
        DataError: The file cannot be read.
    """
    check_text_file(path)
    return _READERS[path.suffix](path)


def check_text_file(path: Path) -> None:
    """Raise DataError unless `path` is a readable, non-empty .txt, .jsonl or .parquet file."""
    if path.is_dir():
        raise DataError(f"{path} is a directory. Give a .txt, .jsonl or .parquet file, or the prefix of a token file.")
    if not path.exists():
        raise DataError(f"{path} does not exist. Give a .txt, .jsonl or .parquet file.")
    if path.suffix not in _READERS:
        raise DataError(f"{path} has an unsupported file type. Give a .txt, .jsonl or .parquet file.")
    if not (path.is_file() or (path.is_fifo() and str(path).startswith("/dev/"))):
        raise DataError(f"{path} is not a regular file. Give a .txt, .jsonl or .parquet file.")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} cannot be read: permission denied. Make the file readable.")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty. Give a file that contains text.")


def is_text_file(path: Path) -> bool:
    """Return whether the file name ends with .txt, .jsonl or .parquet."""
    return path.suffix in _READERS


def read_stdlib() -> Iterator[TextPiece]:
    """Yield the source files of the installed Python standard library, sorted by path. Each file is one document."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB]  # os.walk enters only these
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        text = path.read_bytes()
        yield TextPiece(text, where=str(path), ends_document=True, input_bytes=len(text))


def _read_txt(path: Path) -> Iterator[TextPiece]:
    with path.open("rb") as file:
        text = b"".join(file.readlines(PIECE_BYTES))
        while text:
            following = b"".join(file.readlines(PIECE_BYTES))
            yield TextPiece(text, where=str(path), ends_document=not following, input_bytes=len(text))
            text = following


def _read_jsonl(path: Path) -> Iterator[TextPiece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                fields = parse_json(line)
            except ValueError as error:
                raise DataError(f"{where} is not valid JSON: {error}. Write one JSON object per line.") from None
            text = fields.get("text") if isinstance(fields, dict) else None
            yield TextPiece(_encoded(text, where), where, ends_document=True, input_bytes=len(line))


def _read_parquet(path: Path) -> Iterator[TextPiece]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path} requires pyarrow. Run `pip install pyarrow`, or give a .txt or .jsonl file.") from None
    try:
        with ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if "text" not in columns:
                raise DataError(f"{path} has no text column. Rename one of: {', '.join(columns) or 'none'}.")
            row_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=["text"]):
                for text in batch.column("text").to_pylist():
                    number += 1
                    where = f"{path} row {number}"
                    yield TextPiece(_encoded(text, where), where, ends_document=True, input_bytes=row_bytes)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from None


def _encoded(text: object, where: str) -> bytes:
    if not isinstance(text, str):
        raise DataError(f"{where} has no text. Add a field named text that contains a string.")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} contains text that is not valid Unicode: {error.reason}") from None


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
