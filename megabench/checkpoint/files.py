"""Tensor files of a checkpoint: safetensors files with CRC-32 checksums.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the tensors' bytes). The
writer is implemented here, because the safetensors library cannot compute a checksum while it writes a file. Reading
uses the safetensors library and memory-mapped files.
"""

import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megabench.checkpoint.health import describe_non_finite, is_finite, num_non_finite
from megabench.checkpoint.manifest import DamagedError, FileEntry
from megabench.checkpoint.shards import first_overlap, key, overlap, parse_key, size, within
from megabench.inputs import open_regular
from megabench.models.find import ASSETS
from megabench.models.mapping import Piece
from megabench.optim.optimizers import NON_NEGATIVE
from megabench.runtime.rendezvous import share_of_cores

PART_BYTES = 2 << 30  # approximate size of a file, small enough to write and check several files in parallel
_CHUNK_BYTES = 16 << 20
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SUFFIX = ".safetensors"

Named = tuple[str, Tensor]


def num_threads() -> int:
    """Return the number of files that this process handles in parallel: its share of the CPU cores, at most 8."""
    return min(8, share_of_cores())


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def split(tensors: Sequence[Named]) -> list[list[Named]]:
    """Split `tensors` into groups of about PART_BYTES bytes, in order. Every group contains at least one tensor."""
    parts: list[list[Named]] = []
    filled = PART_BYTES
    for name, tensor in tensors:
        if filled >= PART_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append((name, tensor))
        filled += num_bytes(tensor)
    return parts


def write_files(folder: Path, stem: str, tensors: Sequence[Named]) -> list[FileEntry]:
    """Write `tensors`, from any device, to STEM-00.safetensors, STEM-01.safetensors, … and flush the files to disk.

    Raises:
        OSError: A file cannot be written.
    """
    with ThreadPoolExecutor(num_threads()) as pool:
        return list(
            pool.map(
                lambda numbered: _write_file(folder / f"{stem}-{numbered[0]:02d}{_SUFFIX}", numbered[1]),
                enumerate(split(tensors)),
            )
        )


def _write_file(path: Path, tensors: Sequence[Named]) -> FileEntry:
    checksum = written = 0
    with path.open("wb", buffering=0) as file:
        for chunk in _chunks(tensors):
            checksum = zlib.crc32(chunk, checksum)
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
            written += len(chunk)
        os.fsync(file.fileno())
        # drop the file from the page cache, so that reading it back reads the disk
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return FileEntry(name=path.name, num_bytes=written, crc32=checksum)


def _chunks(tensors: Sequence[Named]) -> Iterator[bytes | memoryview]:
    yield _header(tensors)
    for _, tensor in tensors:
        content = memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]


def _header(tensors: Sequence[Named]) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for name, tensor in tensors:
        stop = start + num_bytes(tensor)
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_assets(folder: Path, assets: Mapping[str, bytes]) -> list[FileEntry]:
    """Write the files of a model other than weights to the ASSETS subdirectory of a checkpoint.

    Raises:
        OSError: A file cannot be written.
    """
    for name, content in assets.items():
        (folder / ASSETS / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / ASSETS / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return [
        FileEntry(name=f"{ASSETS}/{name}", num_bytes=len(content), crc32=zlib.crc32(content))
        for name, content in assets.items()
    ]


def check_files(folder: Path, files: Sequence[FileEntry], on_part: Callable[[], object] = lambda: None) -> None:
    """Raise DamagedError for the first file whose CRC-32 checksum differs from the checksum in the manifest.

    `on_part` is called after each part of a file, from several threads.
    """
    with ThreadPoolExecutor(num_threads()) as pool:
        list(pool.map(lambda file: _check_file(folder, file, on_part), files))


def _check_file(folder: Path, entry: FileEntry, on_part: Callable[[], object]) -> None:
    checksum = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with open_regular(folder / entry.name) as file:
            while length := file.readinto(buffer):
                checksum = zlib.crc32(buffer[:length], checksum)
                on_part()
    except OSError as error:
        raise DamagedError(f"{entry.name} cannot be read: {error.strerror}") from None
    if checksum != entry.crc32:
        raise DamagedError(f"{entry.name} has checksum {checksum:08x} instead of {entry.crc32:08x}")


def check_tensors(folder: Path, files: Sequence[FileEntry], is_training_state: bool) -> None:
    """Raise DamagedError if a tensor has non-finite values, an unknown dtype, or, in a training state, is not fp32."""
    dtypes = ["F32"] if is_training_state else [*_DTYPES]
    with ThreadPoolExecutor(num_threads()) as pool:
        list(pool.map(lambda entry: _check_tensors(folder, entry, dtypes), _tensor_files(files)))


def _check_tensors(folder: Path, entry: FileEntry, dtypes: Sequence[str]) -> None:
    file = _open(folder, entry)
    counts: Counter[str] = Counter()
    for text in file.keys():  # noqa: SIM118  (safe_open is not a dict)
        try:
            kind, piece = parse_key(text)
        except ValueError as error:
            raise DamagedError(f"{entry.name}: {error}") from None
        found = file.get_slice(text)
        if found.get_dtype() not in dtypes:
            raise DamagedError(f"{entry.name}: {text} has dtype {found.get_dtype()}; expected {' or '.join(dtypes)}")
        if tuple(found.get_shape()) != tuple(size(piece)):
            raise DamagedError(f"{entry.name}: {text} has shape {found.get_shape()}; expected {[*size(piece)]}")
        values = file.get_tensor(text)
        if kind in NON_NEGATIVE and values.numel() and values.min() < 0:
            raise DamagedError(f"{entry.name}: {text} has negative values, but {kind} is a mean of squares")
        if not all(is_finite([values])):
            counts[f"{kind} {piece.name}"] += num_non_finite(values)
    if counts:
        raise DamagedError(f"{entry.name}: {describe_non_finite(counts)}")


def _tensor_files(files: Sequence[FileEntry]) -> list[FileEntry]:
    return [entry for entry in files if entry.name.endswith(_SUFFIX)]


def _open(folder: Path, entry: FileEntry) -> Any:
    try:
        return safe_open(str(folder / entry.name), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{entry.name} is not a valid safetensors file: {error}") from None


class TensorFiles:
    """Tensor blocks in the files of a checkpoint, indexed by kind and tensor name. `read` reads the data from disk."""

    def __init__(self, folder: Path, files: Sequence[FileEntry]) -> None:
        """Open the files. Raises DamagedError if two of them contain the same elements of a tensor."""
        self._parts: dict[tuple[str, str], list[tuple[Piece, Any, str]]] = {}
        for entry in _tensor_files(files):
            file = _open(folder, entry)
            for text in file.keys():  # noqa: SIM118  (safe_open is not a dict)
                kind, piece = parse_key(text)
                self._parts.setdefault((kind, piece.name), []).append((piece, file, text))
        for (kind, _), parts in self._parts.items():
            if twice := first_overlap(piece for piece, _, _ in parts):
                raise DamagedError(f"the files contain {key(kind, twice)} twice")

    @property
    def names(self) -> set[tuple[str, str]]:
        """The pairs (kind, tensor name) of all tensors in the files."""
        return set(self._parts)

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored, or raise DamagedError if the tensor is missing."""
        for _, file, text in self._parts.get((kind, name), ()):
            return _DTYPES[file.get_slice(text).get_dtype()]
        raise DamagedError(f"the files do not contain the tensor {kind} {name}")

    def read(self, kind: str, wanted: Piece, into: Tensor) -> None:
        """Copy the block `wanted` into the tensor `into`, of shape [rows, columns] or [rows].

        Raises:
            DamagedError: The files do not contain all elements of the block.
        """
        copied = 0
        for piece, file, text in self._parts.get((kind, wanted.name), ()):
            if shared := overlap(piece, wanted):
                target = into[within(shared, wanted)]
                target.copy_(file.get_slice(text)[within(shared, piece)])
                copied += target.numel()
        if copied != into.numel():
            raise DamagedError(f"the files contain only {copied} of the {into.numel()} elements of {key(kind, wanted)}")
