"""A run goes on in another precision: from bf16 to fp8 under another layout, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabench.checkpoint.directory import folder_of, steps_in
from megabench.checkpoint.files import TensorFiles
from megabench.checkpoint.manifest import Manifest
from megabench.checkpoint.shards import Piece, view
from megabench.config import ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.build import build_engine
from megabench.runtime.rendezvous import Rendezvous
from megabench.train.checkpointing import Checkpoints, restore
from megabench.train.resume import find_resume
from tests import distributed
from tests.engines.equivalence import resolve

pytestmark = pytest.mark.distributed

WORK: dict[str, Any] = {"num_layers": 2, "optimizer": "adamw", "lr": 1e-3, "eps": 1e-8}
# four steps in fp8 change the losses of this small model by up to 2.5e-4
TOLERANCE = 1e-3

State = list[tuple[str, Piece, Tensor]]


def train(run: ResolvedConfig) -> tuple[list[float], list[str], State]:
    """Train up to the last step and save. Return the losses, the notes of the resume, and the restored state."""
    engine, source, device = build_engine(run, torch.device("cpu")), open_source(run), torch.device("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    rendezvous = Rendezvous(dist.distributed_c10d._get_default_store(), rank, size, rank, size)
    resume = find_resume(run, source, rendezvous)
    restored: State = []
    if resume.found:
        restore(engine, resume.found, device)
        shards = engine.training_state().shards
        restored = [(shard.kind, block.piece, view(shard.values, block)) for shard in shards for block in shard.blocks]
        restored = [(kind, piece, values.clone()) for kind, piece, values in restored]
    losses = []
    for step in range(resume.num_done, run.steps):
        batches = micro_batches(source, run, run.layout.coordinates(rank).dp, step)
        losses.append(engine.train_step(batches, run.lr).loss)
    if run.save:
        checkpoints = Checkpoints(run, source, engine, rendezvous, resume, device)
        checkpoints.save(run.steps)
        assert checkpoints.close() is None
    return losses, list(resume.notes), restored


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 1}], ids=str)
def test_from_bf16_to_fp8_and_back(tmp_path: Path, layout: dict[str, Any]) -> None:
    expected = distributed.run(train, 2, resolve(2, **WORK, tp=2, precision="bf16", steps=12))[0][0]
    found: list[float] = []
    for steps, precision, sizes, note in (
        (4, "bf16", {"tp": 2}, None),
        (8, "fp8", layout, "precision bf16 -> fp8"),
        (12, "bf16", {"tp": 2}, "precision fp8 -> bf16"),
    ):
        run = resolve(2, **WORK, **sizes, precision=precision, steps=steps, save=tmp_path, load=note and tmp_path)
        ranks = distributed.run(train, 2, run)
        losses, notes, _ = ranks[0]
        assert len(losses) == 4, "the step numbers continue"
        assert note is None or any(note in text for text in notes), notes
        found += losses
        if note:
            assert_saved(folder_of(tmp_path, steps - 4), [part for _, _, restored in ranks for part in restored])
        training = Manifest.read(folder_of(tmp_path, steps)).training
        assert training and (training.step, training.optimizer.step) == (steps, steps)
    assert steps_in(tmp_path) == [12, 8, 4]
    assert found[:4] == expected[:4]
    assert found == pytest.approx(expected, rel=TOLERANCE), "fp8 changes the losses, but only little"
    assert found[4:8] != expected[4:8], "the products of steps 5 to 8 are fp8"


def assert_saved(folder: Path, restored: State) -> None:
    """The restored master weights and moments have the bits of the checkpoint, and no tensor is missing."""
    saved = TensorFiles(folder, Manifest.read(folder).files)
    assert {(kind, piece.name) for kind, piece, _ in restored} == saved.names
    for kind, piece, values in restored:
        expected = torch.empty_like(values)
        saved.read(kind, piece, into=expected)
        assert values.dtype == torch.float32 == saved.dtype(kind, piece.name)
        assert torch.equal(values, expected), (kind, piece)
