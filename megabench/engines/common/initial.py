"""The initial weights of a run."""

from pathlib import Path

import torch
import torch.distributed as dist

from megabench.checkpoint.manifest import MANIFEST_NAME
from megabench.checkpoint.weights_only import open_weights
from megabench.config import ResolvedConfig
from megabench.engines.common.initial_weights import InitialWeights
from megabench.models.find import is_directory
from megabench.models.model_directory import HuggingFaceWeights
from megabench.models.weights import Weights


def _place() -> tuple[int, int]:
    """Return the rank of this process and the world size."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def initial_weights(run: ResolvedConfig, device: torch.device) -> Weights:
    """Return the weights of the directory `model`, or random weights for a model of the catalogue, on `device`.

    Raises ModelFilesError or CheckpointError if files of the directory are incomplete. No weights are read yet.
    """
    if not is_directory(run.model):
        return InitialWeights(run.shape, run.seed, device)
    folder = Path(run.model)
    if (folder / MANIFEST_NAME).exists():
        return open_weights(folder, *_place())
    return HuggingFaceWeights(folder, run.shape)
