"""The one way to open files that this process did not write. Loads no torch.

A model directory, a checkpoint or the results of a study may come from somebody else. Opening a named pipe blocks until
another process opens it, /dev/zero never ends, and Python's JSON parser raises RecursionError for nested lists and
reads integers that no float can represent. Every function raises OSError for a file that cannot be used, and ValueError
for its content.
"""

import errno
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

SMALL = 2**20  # bytes of a file that a person writes, or that describes a run
LARGE = 2**28  # bytes of a file that a program writes
_DEEPEST = 100  # levels
_TOO_DEEP = f"nested more than {_DEEPEST} levels deep"
_MOST_DIGITS = 300  # a float can represent such an integer; transformers writes 31 digits for "no limit"


def check_regular(path: Path) -> int:
    """Return the size of a regular file. Raises OSError for anything else, e.g. a named pipe or a device."""
    try:
        status = path.stat()
    except ValueError:  # a path with a zero byte or a lone surrogate
        raise OSError(errno.EINVAL, "not a valid path", str(path)) from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not (stat.S_ISREG(status.st_mode) or _is_of_shell(path)):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def _is_of_shell(path: Path) -> bool:
    """Return whether `path` is a pipe that a shell has made, such as /dev/fd/63."""
    return path.is_fifo() and str(path).startswith("/dev/")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError as `check_regular` does."""
    check_regular(path)
    # another process may replace the file by a named pipe after the check
    flags = 0 if _is_of_shell(path) else os.O_NONBLOCK
    return open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))


def read_bytes(path: Path, most_bytes: int = SMALL) -> bytes:
    """Return the content of a regular file of at most `most_bytes` bytes."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        limit = f"{most_bytes >> 20} MiB" if most_bytes >= 2**20 else f"{most_bytes} bytes"
        raise OSError(errno.EFBIG, f"larger than {limit}", str(path))
    return content


def read_text(path: Path, most_bytes: int = SMALL) -> str:
    """Return the text of a regular file in UTF-8."""
    try:
        return read_bytes(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_json(path: Path, most_bytes: int = SMALL) -> Any:
    """Return the value of a JSON file, with the limits of `parse_json`."""
    return parse_json(read_text(path, most_bytes))


def _integer(text: str) -> int:
    if (num_digits := len(text.lstrip("-"))) > _MOST_DIGITS:
        raise ValueError(f"an integer has {num_digits:,} digits, and {_MOST_DIGITS} are the limit")
    return int(text)


_DECODER = json.JSONDecoder(parse_int=_integer)


def parse_json(text: str | bytes, of_pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of JSON text of at most 100 levels, with integers of at most 300 digits.

    `of_pairs` makes an object from its keys and values.
    """
    decoder = json.JSONDecoder(parse_int=_integer, object_pairs_hook=of_pairs) if of_pairs else _DECODER
    try:
        content = decoder.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(content)
    return content


def check_depth(content: Any) -> None:
    """Raise ValueError if lists and mappings are nested too deeply for the functions that read `content`."""
    level, depth = [content], 0
    while level := [
        child
        for one in level
        if isinstance(one, (dict, list))
        for child in (one.values() if isinstance(one, dict) else one)
        if isinstance(child, (dict, list))
    ]:
        depth += 1
        if depth == _DEEPEST:
            raise ValueError(_TOO_DEEP)
