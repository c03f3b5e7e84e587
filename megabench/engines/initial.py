"""The weights that a run starts from."""

from pathlib import Path

from megabench.checkpoint.manifest import MANIFEST_NAME
from megabench.checkpoint.weights import open_weights
from megabench.config import ResolvedConfig
from megabench.models.find import is_directory
from megabench.models.folder import HuggingFaceWeights
from megabench.models.init import InitialWeights
from megabench.models.weights import Weights


def initial_weights(run: ResolvedConfig) -> Weights:
    """Those of the directory that `model` names, or drawn ones for a name of the catalogue.

    ModelFilesError or CheckpointError where the directory's are not whole; none are read yet.
    """
    if not is_directory(run.model):
        return InitialWeights(run.shape, run.seed)
    folder = Path(run.model)
    if (folder / MANIFEST_NAME).exists():
        return open_weights(folder)
    return HuggingFaceWeights(folder, run.shape)
