"""The initial weights of a run as a Hugging Face directory, which programs load."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megabench.checkpoint.manifest import MANIFEST_NAME
from megabench.config import ResolvedConfig
from megabench.engines.common.initial_weights import initial_weights
from megabench.models.find import is_directory
from megabench.models.hugging_face import CONFIG_NAME, config_text, read_config
from megabench.models.mapping import Piece
from megabench.models.weights import Weights
from megabench.models.write_directory import write_weights
from megabench.runtime.device import DTYPES


def initial_model(run: ResolvedConfig) -> Path:
    """Return a directory with the initial weights of the run, in the dtype in which it computes. Collective.

    A Hugging Face directory is used as it is if it has all layers of the model in this dtype. Otherwise one process of
    each host writes the weights into a directory below `run.initial_models`, unless an earlier run has done so.
    """
    folder = Path(run.model)
    if is_directory(run.model) and not (folder / MANIFEST_NAME).exists() and run.num_layers is None:
        config = read_config(folder)
        if config.get("dtype", config.get("torch_dtype")) == str(DTYPES[run.precision]).removeprefix("torch."):
            return folder
    parent = run.initial_models or Path(tempfile.gettempdir()) / f"megabench-initial-models-{os.getuid()}"
    words = f"{_content(folder) if is_directory(run.model) else run.model} {run.shape} {run.seed} {run.precision}"
    written = parent / hashlib.sha256(words.encode()).hexdigest()[:16]
    if os.environ.get("LOCAL_RANK", "0") == "0" and not written.exists():
        _write(run, written)
    dist.barrier()
    return written


def _content(folder: Path) -> str:
    """Return what changes if the weights in a directory do: the names, sizes and times of its files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return f"{folder.resolve()} {[(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]}"


class _Rounded:
    """Weights in one dtype."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, wanted: Piece) -> Tensor:
        return self._weights.read(wanted).to("cpu", self._dtype)


def _write(run: ResolvedConfig, folder: Path) -> None:
    """Write the directory atomically. Hosts that share a disk may all write it, and the first directory stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (partial / CONFIG_NAME).write_bytes(config_text(run.shape))
        write_weights(_Rounded(initial_weights(run, torch.device("cpu")), DTYPES[run.precision]), partial, run.shape)
        os.chmod(partial, 0o755)  # other than the private directories of tempfile
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
