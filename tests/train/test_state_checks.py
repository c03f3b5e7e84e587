"""Checks of the training state: copies, compute weights and hyper-parameters, in every engine."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabench.checkpoint.shards import StateShard
from megabench.config import ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.base import Engine
from megabench.engines.build import build_engine
from megabench.models.mapping import hugging_face_shapes
from megabench.train.state_checks import hyper_parameters_in_use, state_problems
from tests import distributed
from tests.engines.equivalence import resolve

NORM = re.compile(r"norm\.weight$")
Plant = Callable[[Engine, bool], None]  # the engine, and whether this rank gets the error

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"engine": "ddp"}),
    "zero1": (2, {"engine": "deepspeed", "zero_stage": 1}),
    "zero3": (2, {"engine": "deepspeed", "zero_stage": 3}),
    "fsdp": (2, {"engine": "fsdp"}),
    "hsdp": (4, {"engine": "fsdp", "shard_size": 2}),
    "megatron-fsdp": (2, {"engine": "megatron_fsdp"}),
    "tp2-dp2": (4, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
}


def checked(run: ResolvedConfig, plant: Plant | None = None) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Train a step and a half, plant an error on rank 1, and return the problems and the hyper-parameters in use."""
    engine = build_engine(run, torch.device("cpu"))
    rank, source = dist.get_rank(), open_source(run)
    batches = [micro_batches(source, run, run.layout.coordinates(rank).dp, step) for step in range(2)]
    engine.train_step(batches[0], run.lr)
    engine.accumulate(batches[1])
    if plant:
        plant(engine, rank == 1)
    shapes = dict(sorted(hugging_face_shapes(run.shape).items()))
    problems = state_problems(engine, shapes)
    used, unequal = hyper_parameters_in_use(engine)
    return [*problems, *unequal], used


def run_of(name: str, **fields: Any) -> tuple[int, ResolvedConfig]:
    world_size, layout = LAYOUTS[name]
    return world_size, resolve(world_size, **{"optimizer": "adamw", "lr": 1e-3, "precision": "bf16"} | layout | fields)


@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_correct_state_has_no_problem(name: str) -> None:
    world_size, run = run_of(name, param_groups="norm: lr_scale=0.5", eps=1e-7)
    problems, used = distributed.run(checked, world_size, run)[0]
    assert problems == []
    shapes = hugging_face_shapes(run.shape)
    assert used.keys() == shapes.keys(), "the parameter groups contain every tensor"
    for tensor, values in used.items():
        expected = run.hyper_parameters(tensor, len(shapes[tensor]))
        assert values == {
            "lr": run.lr * expected.lr_scale,
            "weight_decay": expected.weight_decay,
            "betas": list(expected.betas),
            "eps": 1e-7,
        }


@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "sgd"])
def test_other_optimizers_have_no_problem(optimizer: str) -> None:
    world_size, run = run_of("ddp", optimizer=optimizer, eps=1e-8)
    problems, used = distributed.run(checked, world_size, run)[0]
    assert problems == [] and used.keys() == hugging_face_shapes(run.shape).keys()


def _change(shards: Iterable[StateShard], is_here: bool) -> None:
    for shard in shards:
        if is_here and shard.kind == "weight" and any(NORM.search(block.piece.name) for block in shard.blocks):
            shard.values.add_(1.0)


def _change_masters(engine: Engine, is_here: bool) -> None:
    _change(engine.training_state().shards, is_here)


def _change_compute_weights(engine: Engine, is_here: bool) -> None:
    _change(engine.compute_weights(), is_here)


def _change_a_learning_rate(engine: Engine, is_here: bool) -> None:
    for group in engine.optimizer_groups:
        if is_here and group["weight_decay"] == 0:
            group["lr"] *= 1.01  # type: ignore[index]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "plant", "words"),
    [
        ("ddp", _change_masters, "The copies of the weight of model."),
        ("hsdp", _change_masters, "The copies of the weight of model."),
        ("tp2-dp2", _change_masters, "The copies of the weight of model."),
        ("zero1", _change_compute_weights, "not those of the optimizer: model.layers.0.input_layernorm.weight"),
        ("zero3", _change_compute_weights, "not those of the optimizer: model.layers.0.input_layernorm.weight"),
        ("tp2-dp2", _change_compute_weights, "not those of the optimizer: model.layers.0.input_layernorm.weight"),
        ("fsdp", _change_a_learning_rate, "The hyper-parameters of "),
        ("tp2-dp2", _change_a_learning_rate, "The hyper-parameters of "),
    ],
)
def test_an_error_on_one_rank_is_a_problem(name: str, plant: Plant, words: str) -> None:
    world_size, run = run_of(name)
    problems, _ = distributed.run(checked, world_size, run, plant)[0]
    assert any(words in problem for problem in problems), problems
