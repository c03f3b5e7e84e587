"""Model files that a checkpoint contains besides tensors: the transformers configuration and the tokenizer."""

from pathlib import Path

from megabench.checkpoint.catalog_config import catalog_config
from megabench.config import ResolvedConfig
from megabench.data.tokenizer import BYTES
from megabench.models.find import ASSETS, is_directory
from megabench.models.hugging_face import CONFIG_NAME
from megabench.models.model_directory import read_assets, read_tokenizer


def assets_of_run(run: ResolvedConfig) -> dict[str, bytes]:
    """Return the configuration and tokenizer files of a run as a mapping from file name to content.

    The run's `tokenizer` setting takes precedence over the tokenizer in the model directory.
    """
    if is_directory(run.model):
        folder = assets_folder(Path(run.model))
        assets = read_assets(folder)
        if run.tokenizer:  # files of two tokenizers must not mix
            assets = {name: assets[name] for name in assets.keys() - read_tokenizer(folder).keys()}
    else:
        assets = {CONFIG_NAME: catalog_config(run)}
    return assets | (read_tokenizer(Path(run.tokenizer)) if run.tokenizer and run.tokenizer != BYTES else {})


def assets_folder(model: Path) -> Path:
    """Return the directory that contains config.json: `model`, or the assets subdirectory of a checkpoint."""
    return model if (model / CONFIG_NAME).exists() else model / ASSETS
