"""Checkpoints of weights alone."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megabench.checkpoint import CheckpointError, files, weights_only
from megabench.checkpoint.manifest import Manifest
from megabench.checkpoint.shards import whole
from megabench.checkpoint.weights_only import open_weights, weights_manifest, write_weights
from megabench.models.catalog import get_model
from megabench.models.mapping import Piece


def save_weights(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """A checkpoint of whole tensors, said to be llama-tiny."""
    folder.mkdir(parents=True)
    blocks = [(whole(name, tuple(tensor.shape)).pieces[0], tensor) for name, tensor in tensors.items()]
    manifest = weights_manifest(get_model("llama-tiny"), write_weights(folder, "weights", blocks))
    manifest.write(folder)
    return manifest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    monkeypatch.setattr(weights_only, "_FILE_BYTES", 2000)
    tensors = {f"layer.{n}.weight": torch.randn(16, 8).to(dtype) for n in range(9)} | {"norm.weight": torch.randn(8)}
    manifest = save_weights(tmp_path / "weights", tensors)
    assert len(manifest.files) >= 3 and manifest.training is None
    found = open_weights(tmp_path / "weights")
    assert found.manifest == manifest and set(found.names) == set(tensors)
    assert found.dtype("layer.3.weight") == dtype and found.dtype("norm.weight") == torch.float32
    assert torch.equal(found.read(Piece("layer.3.weight", (0, 16), (0, 8)), dtype), tensors["layer.3.weight"])
    assert torch.equal(found.read(Piece("layer.3.weight", (4, 9), (2, 3))), tensors["layer.3.weight"][4:9, 2:3].float())
    assert torch.equal(found.read(Piece("norm.weight", (2, 7))), tensors["norm.weight"][2:7])


def test_damage_and_absence_are_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        open_weights(tmp_path)
    manifest = save_weights(tmp_path / "weights", {"a.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match="0 of the 4 elements"):
        open_weights(tmp_path / "weights").read(Piece("b.weight", (0, 2), (0, 2)))
    path = tmp_path / "weights" / manifest.files[0].name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"is damaged: .* checksum"):
        open_weights(tmp_path / "weights")
    open_weights(tmp_path / "weights", rank=1, world_size=2)  # another rank checks this file
