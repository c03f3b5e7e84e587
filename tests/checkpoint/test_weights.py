"""Checkpoints of weights alone."""

from pathlib import Path

import pytest
import torch

from megabench.checkpoint import CheckpointError, files
from megabench.checkpoint.weights import open_weights, save_weights
from megabench.models.catalog import get_model
from megabench.models.mapping import Piece

SHAPE = get_model("llama-tiny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    tensors = {f"layer.{n}.weight": torch.randn(16, 8).to(dtype) for n in range(9)} | {"norm.weight": torch.randn(8)}
    manifest = save_weights(tmp_path / "weights", SHAPE, iter(tensors.items()))
    assert len(manifest.files) >= 3 and manifest.num_elements == {"weight": 9 * 128 + 8} and manifest.training is None
    weights = open_weights(tmp_path / "weights")
    assert weights.manifest == manifest and set(weights.names) == set(tensors)
    assert torch.equal(weights.read(Piece("layer.3.weight", (0, 16), (0, 8)), dtype), tensors["layer.3.weight"])
    assert torch.equal(
        weights.read(Piece("layer.3.weight", (4, 9), (2, 3))), tensors["layer.3.weight"][4:9, 2:3].float()
    )
    assert torch.equal(weights.read(Piece("norm.weight", (2, 7))), tensors["norm.weight"][2:7])


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path: Path) -> None:
    def failing():
        yield "a.weight", torch.ones(2, 2)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        save_weights(tmp_path / "weights", SHAPE, failing())
    assert list(tmp_path.iterdir()) == []
    save_weights(tmp_path / "weights", SHAPE, [("a.weight", torch.ones(2, 2))])
    with pytest.raises(CheckpointError, match="exists already"):
        save_weights(tmp_path / "weights", SHAPE, [("a.weight", torch.zeros(2, 2))])


def test_damage_and_absence_are_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        open_weights(tmp_path)
    save_weights(tmp_path / "weights", SHAPE, [("a.weight", torch.ones(2, 2))])
    weights = open_weights(tmp_path / "weights")
    with pytest.raises(CheckpointError, match="0 of the 4 elements"):
        weights.read(Piece("b.weight", (0, 2), (0, 2)))
    path = tmp_path / "weights" / weights.manifest.files[0].name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"is damaged: .* checksum"):
        open_weights(tmp_path / "weights")
