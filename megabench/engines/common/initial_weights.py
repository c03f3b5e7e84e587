"""The initial weights of a run: those of a directory, or random weights that do not depend on the layout.

Each random Hugging Face parameter is drawn in fp32 tiles. Each tile has its own random generator, whose seed depends on
the run's seed, the parameter's name and the tile's position. A rank draws only the tiles that its shards overlap. All
layouts and engines therefore start from the same weights, and no process needs the whole model. Tiles are drawn on CPU,
so that their values do not depend on the device.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megabench.checkpoint.manifest import MANIFEST_NAME
from megabench.checkpoint.weights_only import open_weights
from megabench.config import ResolvedConfig
from megabench.models.find import is_directory
from megabench.models.mapping import Piece, hugging_face_shapes
from megabench.models.model_directory import HuggingFaceWeights
from megabench.models.shape import ModelShape
from megabench.models.weights import Weights
from megabench.runtime.rendezvous import share_of_cores

TILE = 1024  # number of rows and columns of a tile
_CPU = torch.device("cpu")
_STD = 0.02  # initializer_range of transformers' Llama, GPT-2 and BLOOM


def initial_weights(run: ResolvedConfig, device: torch.device) -> Weights:
    """Return the weights of the directory `model`, or random weights for a model of the catalogue, on `device`.

    Raises ModelFilesError or CheckpointError if files of the directory are incomplete. No weights are read yet.
    """
    if not is_directory(run.model):
        return RandomWeights(run.shape, run.seed, device)
    folder = Path(run.model)
    if (folder / MANIFEST_NAME).exists():
        return open_weights(folder, *_place())
    return HuggingFaceWeights(folder, run.shape)


def _place() -> tuple[int, int]:
    """Return the rank of this process and the world size."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class RandomWeights:
    """Random initial weights of a model on `device`; see `megabench.models.weights.Weights`."""

    def __init__(self, shape: ModelShape, seed: int, device: torch.device = _CPU) -> None:
        self._shape, self._seed, self._device = shape, seed, device
        self._sizes = hugging_face_shapes(shape)

    def read(self, wanted: Piece) -> Tensor:
        """Return a block in fp32, on the device of these weights."""
        std = standard_deviation(wanted.name, self._shape)
        return initial_piece(wanted, self._sizes[wanted.name], std, self._seed, self._device)


def standard_deviation(name: str, shape: ModelShape) -> float:
    """Return the standard deviation of a matrix: 0.02, or 0.02 / √(2·layers) before a residual sum (GPT-2)."""
    if name.endswith(shape.table.residual):
        return _STD / math.sqrt(2 * shape.num_layers)
    return _STD


def initial_piece(
    piece: Piece, full_shape: tuple[int, ...], std: float, seed: int, device: torch.device = _CPU
) -> Tensor:
    """Return the initial values of a block of a Hugging Face parameter in fp32 on `device`, [rows, columns] or [rows].

    Vectors are norm weights, which start at one, or biases, which start at zero. `full_shape` is the shape of the whole
    parameter.
    """
    if piece.columns is None:
        return torch.full((piece.num_rows,), 0.0 if piece.name.endswith(".bias") else 1.0, device=device)
    (top, bottom), (left, right) = piece.rows, piece.columns
    block = torch.empty(bottom - top, right - left, device=device)

    def draw(position: tuple[int, int]) -> None:
        row, column = position
        height = min(TILE, full_shape[0] - row * TILE)
        width = min(TILE, full_shape[1] - column * TILE)
        digest = hashlib.sha256(f"{seed}/{piece.name}/{row}/{column}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        tile = torch.empty(height, width).normal_(0.0, std, generator=generator)
        first_row, last_row = max(top, row * TILE), min(bottom, row * TILE + height)
        first_column, last_column = max(left, column * TILE), min(right, column * TILE + width)
        target = block[first_row - top : last_row - top, first_column - left : last_column - left]
        values = tile.numpy()[
            first_row - row * TILE : last_row - row * TILE, first_column - column * TILE : last_column - column * TILE
        ]
        # numpy copies in the calling thread; torch would start more threads
        if device.type == "cpu":
            target.numpy()[:] = values
        else:
            target.copy_(torch.from_numpy(np.ascontiguousarray(values)))

    tiles = [
        (row, column)
        for row in range(top // TILE, -(-bottom // TILE))
        for column in range(left // TILE, -(-right // TILE))
    ]
    # drawing random numbers releases the GIL; a thread that does not set its device would create a CUDA context on GPU
    # 0
    with ThreadPoolExecutor(share_of_cores(), initializer=_bind, initargs=(device,)) as pool:
        list(pool.map(draw, tiles))
    return block


def _bind(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
