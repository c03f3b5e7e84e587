"""The files of a Hugging Face model directory other than weights: configuration, tokenizer, templates and documents."""

import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from megabench.inputs import read_bytes
from megabench.models.hugging_face import CONFIG_NAME

_PART = r"\w[\w .,+=@&()'~#%!\[\]-]*"
# the path of a copied file below its directory, in the syntax that re and pydantic share; it never leaves the directory
ASSET_NAME = rf"({_PART}/){{0,3}}{_PART}"

LARGEST_FILE = 64 << 20
LARGEST_TOTAL = 256 << 20
MOST_FILES = 500
_LONGEST_NAME = 180  # with its folder in a checkpoint, the limit of a manifest
_MOST_NAMED = 8  # number of files that a note names

_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|pkl|pickle|ckpt|h5|hdf5|msgpack|npz|npy|gguf|ggml|onnx|ot|tflite|mlmodel|nemo|distcp"
    r"|pdparams|pdmodel|llamafile)(\.index\.json|\.index|\.meta|\.data.*|[.-]?part.*)?$"
    r"|[._]onnx_data.*$",
    re.IGNORECASE,
)
# transformers would load the base model of an adapter
_NOT_COPIED = re.compile(r"\..*|adapter_config\.json|events\.out\.tfevents\..*|.*\.(pyc|lock|incomplete|tmp|partial)")
_NOT_COPIED_FOLDERS = re.compile(r"\..*|__pycache__|runs|wandb|mlruns|lightning_logs|tensorboard|logs")
_OWN_MODEL = {CONFIG_NAME, "adapter_config.json", "manifest.json"}
_TOKENIZER = re.compile(
    r"(tokenizer|tokenization|[\w-]*vocab|merges|spiece|sentencepiece|special_tokens|added_tokens|chat_template)[\w.-]*"
    r"|(tekken|emoji|normalizer|byte_maps|word_shape|word_pronunciation)\.json|dict\.txt|bpe\.codes"
    r"|.*\.(model|model\.v\d+|tiktoken|tokenizer|spm|vocab|jinja)|additional_chat_templates/.*"
)
_CONFIGURATION = re.compile(r"(generation_|preprocessor_|processor_)?config\.json")


def is_weights(name: str) -> bool:
    """Return whether a file of a model directory contains weights, or describes files that contain weights."""
    return bool(_WEIGHTS.search(Path(name).name))


def is_tokenizer(name: str) -> bool:
    """Return whether a file, given by its path below the model directory, belongs to the tokenizer."""
    return bool(_TOKENIZER.fullmatch(name))


def read_assets(
    folder: Path, note: Callable[[str], None], is_wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, bytes]:
    """Return the files of a model directory except its weights, by their path below `folder`, if `is_wanted(path)`.

    Hidden files, the logs of training runs and subdirectories with another model are left out. `note` is called with
    a sentence that names the other files that are left out: files over LARGEST_FILE bytes, files beyond MOST_FILES
    files or LARGEST_TOTAL bytes, unreadable files, and links that `_is_allowed` rejects. The configuration and the
    tokenizer come first.
    """
    root, content, left_out, total = folder.resolve(), dict[str, bytes](), list[str](), 0
    for path in _files(root, left_out):
        name = path.relative_to(root).as_posix()
        if not is_wanted(name):
            continue
        if len(content) == MOST_FILES:
            left_out.append(f"{name!a} and all files after it (limit: {MOST_FILES} files)")
            break
        try:
            reason = _reason_against(root, path, LARGEST_TOTAL - total)
            if not reason:
                content[name] = read_bytes(path, LARGEST_FILE)
                total += len(content[name])
        except OSError as error:
            reason = str(error.strerror)
        if reason:
            left_out.append(f"{name!a} ({reason})")
    if left_out:
        others = f" and {len(left_out) - _MOST_NAMED} others" if len(left_out) > _MOST_NAMED else ""
        note(f"not copied from {folder}: {', '.join(left_out[:_MOST_NAMED])}{others}")
    return content


def has_tokenizer(folder: Path) -> bool:
    """Return whether `folder` contains a file of a tokenizer."""
    return any(is_tokenizer(path.name) for path in folder.iterdir() if path.is_file())


def _reason_against(root: Path, path: Path, most_bytes: int) -> str | None:
    """Return why a file is not copied, or None for a file that is copied."""
    name = path.relative_to(root).as_posix()
    if len(name) > _LONGEST_NAME or not re.fullmatch(ASSET_NAME, name):
        return "its path is too long or too deep, or has unusual characters"
    target = path.resolve(strict=True)
    if target != path and not _is_allowed(root, path, target):
        return f"a link to {target}; replace the link with the file"
    status = target.stat()
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_size > LARGEST_FILE:
        return f"{status.st_size >> 20} MiB; the limit is {LARGEST_FILE >> 20} MiB for one file"
    if status.st_size > most_bytes:
        return f"the limit is {LARGEST_TOTAL >> 20} MiB for all files"
    return None


def _is_required(name: str) -> bool:
    """Return whether a file is part of the configuration or the tokenizer."""
    return is_tokenizer(name) or bool(_CONFIGURATION.fullmatch(name))


def _is_allowed(root: Path, link: Path, target: Path) -> bool:
    """Return whether the target of a link belongs to the model.

    A malicious directory could contain symbolic links to private files of the user, such as SSH keys. A link is
    therefore followed only if its target is a file of the same directory, or a blob of the Hugging Face cache that
    contains the directory. Links to configuration and tokenizer files are also followed if their targets have the same
    names.
    """
    if target.is_relative_to(root):
        name = target.relative_to(root).as_posix()
        return bool(re.fullmatch(ASSET_NAME, name)) and not is_weights(name)
    for repository in root.parents:
        if repository.name.startswith("models--") and root.is_relative_to(repository / "snapshots"):
            blobs = (repository / "blobs", repository.parent / "blobs")  # the second one is shared by repositories
            if any(target.is_relative_to(folder) for folder in blobs):
                return True
    return link.parent == root and link.name == target.name and _is_required(link.name)


def _files(root: Path, left_out: list[str]) -> Iterator[Path]:
    """Yield the files of a model directory that may be copied: first the files of `root`, then of its subdirectories.

    Subdirectories that are not copied are added to `left_out`, except those that never belong to a model.
    """
    folders = deque([root])
    while folders:
        here = folders.popleft()
        try:
            found = sorted(os.scandir(here), key=lambda entry: (not _is_required(entry.name), entry.name))
        except OSError as error:
            left_out.append(f"{here.relative_to(root).as_posix()!a} ({error.strerror})")
            continue
        names = {entry.name for entry in found}
        if here != root and names & _OWN_MODEL and any(map(is_weights, names)):
            left_out.append(f"{here.relative_to(root).as_posix()!a} (another model)")
            continue
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                if not _NOT_COPIED_FOLDERS.fullmatch(entry.name):
                    folders.append(here / entry.name)
            elif not (_NOT_COPIED.fullmatch(entry.name) or is_weights(entry.name)):
                yield here / entry.name
