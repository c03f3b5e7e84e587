"""At the width of Llama-3-8B, on GPUs and over NCCL, every layout and engine does what one GPU does, in fp32."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megabench.config import ResolvedConfig
from megabench.models.catalog import CATALOG
from megabench.precision import POLICIES
from tests import distributed
from tests.engines.cases import cases
from tests.engines.equivalence import ANY_MODEL, OPTIMIZERS, Trace, differences, resolve, train, train_reference, worst

NUM_GPUS = torch.cuda.device_count()
TOLERANCE = 1e-4  # sums over 4096 to 14336 products, in other orders; on CPU the models are a hundredth as wide
# an eighth of the vocabulary: embeddings are most of a model of four layers, and the slowest to draw and to compare
CATALOG["llama3-8b-wide"] = replace(CATALOG["llama3-8b"], name="llama3-8b-wide", num_layers=4, vocab_size=16032)
# one KV head, which context parallelism cannot deal out
CATALOG["llama3-8b-wide-mqa"] = replace(CATALOG["llama3-8b-wide"], name="llama3-8b-wide-mqa", num_kv_heads=1)
# eps of about the size of the gradients: small enough that weights move, large enough that rounding does not
BASE: dict[str, Any] = {"model": "llama3-8b-wide", "num_layers": None, "seq_length": 512, "device": "cuda"}
BASE |= OPTIMIZERS["adamw"] | {"eps": 1e-5}
NUM_STEPS = 2

RUNS: dict[str, tuple[int, dict[str, Any]]] = cases("ON_GPUS")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS, reason="NCCL needs GPUs"),
]


def save_reference(run: ResolvedConfig, path: Path) -> None:
    torch.save(vars(train_reference(run, NUM_STEPS)), path)


def compare(run: ResolvedConfig, path: Path) -> dict[str, float]:
    """The relative difference of everything from the reference; on rank 0, and empty elsewhere."""
    trace = train(run, NUM_STEPS)
    torch.cuda.empty_cache()
    return differences(trace, Trace(**torch.load(path, mmap=True))) if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The trace of a model on one GPU, made when it is first asked for."""

    @cache
    def of(model: str) -> Path:
        path = tmp_path_factory.mktemp("reference") / "trace.pt"
        distributed.run(
            save_reference, 1, resolve(1, **BASE | {"model": model}, engine=ANY_MODEL), path, backend="nccl"
        )
        return path

    return of


@pytest.fixture(autouse=True)
def fresh_workers() -> Iterator[None]:
    distributed.close()
    yield
    distributed.close()


@pytest.mark.parametrize("name", RUNS)
def test_as_one_gpu(name: str, reference: Callable[[str], Path]) -> None:
    world_size, fields = RUNS[name]
    fields = BASE | fields
    if world_size > NUM_GPUS:
        pytest.skip(f"needs {world_size} GPUs, and there are {NUM_GPUS}")
    run = resolve(world_size, **fields)
    found = distributed.run(compare, world_size, run, reference(fields["model"]), backend="nccl")[0]
    what, difference = worst(found)
    print(f"{name}: {what} differs most, by {difference:.1e}")
    assert difference < TOLERANCE, f"{what} differs by {difference:.1e}"


def changed_by_evaluations(run: ResolvedConfig) -> tuple[list[str], list[float], list[float]]:
    """What evaluations between the steps change, to the last bit; the evaluated losses, and those of the steps."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # which cuBLAS reads when it starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    without = train(run, NUM_STEPS)
    torch.cuda.empty_cache()
    trace = train(run, NUM_STEPS, evaluates=True)
    changed = [name for name in ("losses", "grad_norms") if getattr(without, name) != getattr(trace, name)]
    changed += [name for name, weight in without.weights.items() if not torch.equal(weight, trace.weights[name])]
    return changed, trace.evaluated, trace.losses


@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp", "megatron-fsdp", "tp2", "tp2-copy-engines"])
def test_evaluations_change_no_bit(name: str) -> None:
    """With sequences of one block of the attention kernels, which add the gradients of several blocks in any order."""
    world_size, fields = RUNS[name]
    if world_size > NUM_GPUS:
        pytest.skip(f"needs {world_size} GPUs, and there are {NUM_GPUS}")
    run = resolve(world_size, **BASE | {"precision": "bf16", "seq_length": 64} | fields)
    ranks = distributed.run(changed_by_evaluations, world_size, run, backend="nccl")
    for changed, evaluated, losses in ranks:
        assert changed == []
        assert evaluated == ranks[0][1], "ranks evaluate different losses"
        assert evaluated == pytest.approx(losses, rel=POLICIES["bf16"].loss_rounding)


def compare_too_early(run: ResolvedConfig, path: Path) -> dict[str, float]:
    """Copies take 5 ms longer, and parts are read before they have arrived."""
    from megabench.engines.megatron.copy_engines import CopyEngines, _Buffers

    launch, await_signal, elsewhere = CopyEngines._copying, _Buffers.await_signal, torch.cuda.Stream()

    @contextmanager
    def late(exchange: CopyEngines) -> Iterator[None]:
        with launch(exchange):
            torch.cuda._sleep(10_000_000)
            yield

    def read_at_once(buffers: _Buffers, rank: int) -> None:
        with torch.cuda.stream(elsewhere):
            await_signal(buffers, rank)

    with patch.object(CopyEngines, "_copying", late), patch.object(_Buffers, "await_signal", read_at_once):
        return compare(run, path)


def test_parts_that_are_read_too_early_show(reference: Callable[[str], Path]) -> None:
    world_size, fields = RUNS["tp2-copy-engines"]
    if world_size > NUM_GPUS:
        pytest.skip(f"needs {world_size} GPUs, and there are {NUM_GPUS}")
    run = resolve(world_size, **BASE | fields)
    found = distributed.run(compare_too_early, world_size, run, reference(BASE["model"]), backend="nccl")[0]
    assert not worst(found)[1] < 100 * TOLERANCE


def test_another_update_shows(reference: Callable[[str], Path]) -> None:
    """A learning rate that is 5% off, which gradients cannot tell."""
    run = resolve(1, **(BASE | {"lr": 1.05e-3}))
    found = distributed.run(compare, 1, run, reference(BASE["model"]), backend="nccl")[0]
    what, difference = worst(found)
    assert what.startswith("weights") and difference > 3 * TOLERANCE
