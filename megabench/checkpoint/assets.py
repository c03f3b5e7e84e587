"""What a checkpoint carries beside its weights, so that transformers can use them: configuration and tokenizer."""

from pathlib import Path

from megabench.config import ResolvedConfig
from megabench.data.tokenizer import BYTES
from megabench.models.find import ASSETS, is_directory
from megabench.models.hugging_face import CONFIG_NAME, config_text
from megabench.models.model_directory import read_assets, read_tokenizer


def assets_of_run(run: ResolvedConfig) -> dict[str, bytes]:
    """The files, by name, that belong to the model of a run; its own tokenizer wins over the model's."""
    if is_directory(run.model):
        assets = read_assets(assets_folder(Path(run.model)))
    else:
        assets = {CONFIG_NAME: config_text(run.shape)}
    return assets | (read_tokenizer(Path(run.tokenizer)) if run.tokenizer != BYTES else {})


def assets_folder(model: Path) -> Path:
    """Where a model's directory keeps its configuration: a checkpoint's is apart from its weights."""
    return model if (model / CONFIG_NAME).exists() else model / ASSETS
