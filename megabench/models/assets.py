"""The files of a Hugging Face model directory other than weights: configuration and tokenizer files."""

from pathlib import Path

from megabench.models.hugging_face import CONFIG_NAME

GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def read_assets(folder: Path) -> dict[str, bytes]:
    """Return all files of a model except its weights, by name: configuration, generation settings and tokenizer."""
    return _read(folder, (CONFIG_NAME, GENERATION_CONFIG)) | read_tokenizer(folder)


def read_tokenizer(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer files in `folder` by name. Without a tokenizer, the result is empty."""
    return _read(folder, _TOKENIZER_FILES)


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
