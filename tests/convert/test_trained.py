"""Converted models in training: the same losses under every layout, and what fine-tuning made of them, exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megabench.checkpoint.shards import whole
from megabench.checkpoint.weights_only import open_weights
from megabench.config import ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.build import build_engine
from megabench.runtime.rendezvous import Rendezvous
from megabench.train.checkpointing import Checkpoints
from megabench.train.resume import Resume
from tests import distributed
from tests.convert.test_round_trip import export_here, import_here, tensors_of
from tests.engines.equivalence import relative_difference, resolve
from tests.models.tiny import CATALOG, save_model

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {"tp4": {"tp": 4}, "pp4": {"pp": 4}, "dp4": {}, "tp2-pp2": {"tp": 2, "pp": 2}}


def train_and_save(run: ResolvedConfig, num_steps: int) -> list[float]:
    """The losses of some steps, after which the state is saved, if the run saves."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    dp_rank = run.layout.coordinates(dist.get_rank()).dp
    losses = []
    for step in range(num_steps):
        losses.append(engine.train_step(micro_batches(source, run, dp_rank, step), run.lr).loss)
    if run.save:
        run.save.mkdir(exist_ok=True)
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        rendezvous = Rendezvous(store, rank, dist.get_world_size(), rank, dist.get_world_size())
        checkpoints = Checkpoints(run, source, engine, rendezvous, Resume(), torch.device("cpu"))
        checkpoints.save(num_steps)
        assert checkpoints.close() is None
    return losses


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model of five layers, imported under tp2·pp2; its source lies beside it."""
    root = tmp_path_factory.mktemp("models")
    save_model(root / "source", CATALOG["llama32-tiny"].with_layers(5))
    distributed.run(import_here, 4, root / "source", root / "checkpoint", 2, 2)
    return root / "checkpoint"


def test_every_layout_has_the_same_losses(imported: Path) -> None:
    traces = {}
    for name, fields in LAYOUTS.items():
        run = resolve(4, model=str(imported), num_layers=None, optimizer="adamw", lr=1e-3, **fields)
        traces[name] = torch.tensor(distributed.run(train_and_save, 4, run, 3)[0])
    for name, losses in traces.items():
        assert relative_difference(losses, traces["dp4"]) < 1e-5, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_untrained_it_comes_out_as_it_went_in(tmp_path: Path, imported: Path, layout: str) -> None:
    run = resolve(4, model=str(imported), num_layers=None, save=tmp_path / "run", **LAYOUTS[layout])
    distributed.run(train_and_save, 4, run, 0)
    distributed.run(export_here, 1, tmp_path / "run", tmp_path / "exported")
    distributed.run(export_here, 1, imported, tmp_path / "expected")
    files = sorted(path.name for path in (tmp_path / "expected").iterdir())
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == files
    for name in files:
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name


def test_every_file_of_the_model_survives(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_model(source, CATALOG["llama32-tiny"].with_layers(1))
    for name in ("spiece.model", "LICENSE", "a note.txt", "additional_chat_templates/tool.jinja", "deep/er/file.json"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "optimizer.pt").write_text("no file of the model")
    distributed.run(import_here, 1, source, tmp_path / "checkpoint", 1, 1)
    run = resolve(1, model=str(tmp_path / "checkpoint"), num_layers=None, save=tmp_path / "run")
    distributed.run(train_and_save, 1, run, 0)
    distributed.run(export_here, 1, tmp_path / "run", tmp_path / "exported")
    expected = {path.relative_to(source) for path in source.rglob("*") if path.is_file()} - {Path("optimizer.pt")}
    files = [path for path in (tmp_path / "exported").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "exported") for path in files} == expected
    for path in expected:
        assert (tmp_path / "exported" / path).read_bytes() == (source / path).read_bytes(), path


def test_fine_tuned_by_two_engines(tmp_path: Path, imported: Path) -> None:
    engines: dict[str, dict[str, Any]] = {"megatron": {"tp": 2, "pp": 2}, "deepspeed": {"zero_stage": 3}}
    exported = {}
    for engine, fields in engines.items():
        save = tmp_path / engine
        fields = {"model": str(imported.parent / "source"), "num_layers": None, "save": save, **fields}
        run = resolve(4, engine=engine, optimizer="adamw", lr=1e-3, steps=20, **fields)
        distributed.run(train_and_save, 4, run, 20)
        distributed.run(export_here, 1, save, save / "exported")
        exported[engine] = tensors_of(save / "exported")
    start = tensors_of(imported.parent / "source")
    assert exported["megatron"].keys() == exported["deepspeed"].keys() == start.keys()
    for name, tensor in exported["deepspeed"].items():
        assert relative_difference(exported["megatron"][name], tensor) < 1e-5, name
        assert relative_difference(tensor, start[name]) > 1e-4, f"{name} was not trained"


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("model", ["gpt2-tiny", "bloom-tiny"])
def test_without_parallel_blocks(tmp_path: Path, model: str, engine: str) -> None:
    save = tmp_path / "run"
    run = resolve(2, model=model, num_layers=None, engine=engine, save=save, optimizer="adamw", lr=1e-3, steps=3)
    distributed.run(train_and_save, 2, run, 3)
    (comparison,) = distributed.run(export_here, 1, save, tmp_path / "exported")
    assert comparison is not None and comparison.is_equal and comparison.num_tokens == 256
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    weights, names = open_weights(save), dict(loaded.named_parameters())
    assert names.keys() == set(weights.names)
    for name, parameter in names.items():
        assert torch.equal(parameter, weights.read(whole(name, tuple(parameter.shape)).pieces[0])), name
