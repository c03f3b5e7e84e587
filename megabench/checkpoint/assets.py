"""Model files that a checkpoint contains besides tensors: configuration, tokenizer, templates and documents."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.manifest import MANIFEST_NAME, DamagedError, FileEntry, Manifest
from megabench.config import ResolvedConfig
from megabench.data.checks import STDLIB, tokenizer_of
from megabench.data.text import is_text_file
from megabench.data.token_file import recorded_facts, token_file_prefix
from megabench.data.tokenizer import BYTES, ByteTokenizer, open_tokenizer
from megabench.inputs import read_bytes
from megabench.models.assets import is_tokenizer, is_weights, read_assets
from megabench.models.find import ASSETS, is_directory
from megabench.models.hugging_face import CONFIG_NAME, config_text


def assets_of_run(run: ResolvedConfig, note: Callable[[str], None]) -> dict[str, bytes]:
    """Return the model files of a run, by their path in the ASSETS subdirectory of a checkpoint.

    The tokenizer in the run's `tokenizer` setting replaces the tokenizer of the model directory. `note` is called with
    a sentence that names files of these directories that are left out.

    Raises:
        CheckpointError: The run's model is a checkpoint with damaged model files.
    """
    assets = _assets_in(Path(run.model), note) if is_directory(run.model) else {CONFIG_NAME: _catalog_config(run)}
    if run.tokenizer and run.tokenizer != run.model:
        assets = {name: content for name, content in assets.items() if not is_tokenizer(name)}
        if run.tokenizer != BYTES:
            assets |= _assets_in(Path(run.tokenizer), note, is_tokenizer)
    return assets


def _catalog_config(run: ResolvedConfig) -> bytes:
    """Return the content of config.json for the model of a run, with the run's sequence length and special tokens.

    Programs that serve the model accept no longer sequences than `max_position_embeddings`, and stop at
    `eos_token_id`. Fields that the file omits have the defaults of the model's family. `bos_token_id` is null, because
    no document of the training data begins with a special token.
    """
    content = json.loads(config_text(run.shape))
    if (num_positions := content.get("max_position_embeddings")) and run.shape.rope_theta:
        content["max_position_embeddings"] = max(num_positions, run.seq_length)
    content |= {"bos_token_id": None, "eos_token_id": _end_of_document(run)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _end_of_document(run: ResolvedConfig) -> int | None:
    """Return the token that ends a document in the training data, or None if the tokenizer of the data is unknown."""
    path = Path(run.data)
    if run.data == STDLIB or is_text_file(path):
        return tokenizer_of(run).end_of_document
    if run.tokenizer:
        return open_tokenizer(run.tokenizer).end_of_document
    facts = recorded_facts(prefix) if (prefix := token_file_prefix(path)) else None
    has_bytes = facts and facts.tokenizer and facts.tokenizer.name == BYTES
    return ByteTokenizer.end_of_document if has_bytes else None


def _assets_in(
    folder: Path, note: Callable[[str], None], is_wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, bytes]:
    """Return the model files in a model directory, a checkpoint, or the ASSETS subdirectory of a checkpoint."""
    checkpoint = folder.parent if folder.name == ASSETS else folder
    if (checkpoint / CONFIG_NAME).exists() or not (checkpoint / MANIFEST_NAME).exists():
        return read_assets(folder, note, is_wanted)
    return {name: content for name, content in listed_assets(checkpoint).items() if is_wanted(name)}


def listed_assets(folder: Path) -> dict[str, bytes]:
    """Return the model files that the manifest of a checkpoint lists, by their path in the ASSETS subdirectory.

    Raises:
        CheckpointError: A file does not match the manifest, or is a link to a file outside the checkpoint.
    """
    try:
        return {
            entry.name.removeprefix(f"{ASSETS}/"): _read_listed(folder.resolve(), entry)
            for entry in Manifest.read(folder).files
            if entry.name.startswith(f"{ASSETS}/") and not is_weights(entry.name)
        }
    except DamagedError as error:
        raise CheckpointError(f"{folder} is damaged: {error}. Use another checkpoint.") from None


def _read_listed(root: Path, entry: FileEntry) -> bytes:
    path = root / entry.name
    if not path.resolve().is_relative_to(root):
        raise DamagedError(f"{entry.name} is a link to a file outside the checkpoint")
    try:
        content = read_bytes(path, entry.num_bytes)
    except OSError as error:
        raise DamagedError(f"{entry.name} cannot be read: {error.strerror}") from None
    if zlib.crc32(content) != entry.crc32:
        raise DamagedError(f"{entry.name} does not have the checksum in the manifest")
    return content
