"""FSDP2 sends the weights of fp8 products in fp8, and trains as if it cast whole weights that it gathers in bf16."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megabench.config import ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.common.fp8_linear import Fp8Linear
from megabench.engines.fsdp.engine import FsdpEngine
from megabench.train.callbacks.comm_volume import SentBytes
from tests import distributed
from tests.engines.equivalence import OPTIMIZERS, Trace, differences, resolve, train
from tests.engines.test_resume import SMALL, difference, save_at_six

pytestmark = pytest.mark.distributed

FP8: dict[str, Any] = {"engine": "fsdp", "precision": "fp8"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {}),
    "three": (3, {"global_batch": 3}),  # which do not divide the rows of the weights
    "hsdp": (4, {"shard_size": 2, "global_batch": 8}),
}


@contextmanager
def gathers_in_bf16() -> Iterator[None]:
    with patch.object(FsdpEngine, "_fp8_shards", lambda engine: None):
        yield


def train_with_gathers_in_bf16(run: ResolvedConfig) -> Trace:
    with gathers_in_bf16():
        return train(run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_numbers_as_with_gathers_in_bf16(layout: str) -> None:
    world_size, fields = LAYOUTS[layout]
    run = resolve(world_size, **FP8 | OPTIMIZERS["adamw"] | {"lr": 0.01} | fields)
    ours, theirs = (distributed.run(job, world_size, run)[0] for job in (train, train_with_gathers_in_bf16))
    assert set(differences(ours, theirs).values()) == {0.0}


def sent_bytes(run: ResolvedConfig) -> tuple[int, int, dict[str, str]]:
    """What this rank sends in forward and backward, the size of all weights of fp8 products, and the kernels."""
    engine, source = FsdpEngine(run, torch.device("cpu")), open_source(run)
    batches = micro_batches(source, run, dist.get_rank(), 0)
    with SentBytes(run.layout) as counted:
        engine.accumulate(batches)
    layers = [layer for layer in engine.model.modules() if isinstance(layer, Fp8Linear)]
    assert all(layer.in_features % 16 == layer.out_features % 16 == 0 for layer in layers)
    return counted.sent["dp"], sum(layer.weight.numel() for layer in layers), engine.kernels


def sent_bytes_with_gathers_in_bf16(run: ResolvedConfig) -> tuple[int, int, dict[str, str]]:
    with gathers_in_bf16():
        return sent_bytes(run)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_one_byte_per_element_is_sent(is_compiled: bool) -> None:
    run = resolve(2, **FP8, global_batch=2, compile=is_compiled)
    fp8, size, kernels = distributed.run(sent_bytes, 2, run)[0]
    bf16, _, plain_kernels = distributed.run(sent_bytes_with_gathers_in_bf16, 2, run)[0]
    num_weights = run.num_layers * 7
    # each rank sends its half of the weights in forward and again in backward; the amaxes are fp32
    assert bf16 - fp8 == size * (2 - 1) - num_weights * 4
    assert kernels == plain_kernels | {"weight_gather": "fp8"}


def test_gradients_in_bf16_need_the_weights_in_bf16() -> None:
    run = resolve(2, **FP8, global_batch=2, fp8_recipe="bf16-gradients")
    sent, _, kernels = distributed.run(sent_bytes, 2, run)[0]
    assert sent == distributed.run(sent_bytes_with_gathers_in_bf16, 2, run)[0][0]
    assert "weight_gather" not in kernels


@pytest.mark.parametrize("options", [{}, {"offload": "all"}], ids=str)
def test_a_resumed_run_continues_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    fields = SMALL | FP8 | {"lr": 0.01} | options
    losses = save_at_six(tmp_path, 2, **fields)
    assert difference(tmp_path, losses, 2, **fields) == 0
