"""What is particular to DDP: gradients in buckets, compiled blocks, PowerSGD, its loss scale."""

import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from megabench.autotune.probe import probe_config
from megabench.config import ResolvedConfig
from megabench.cost.job import Recompute
from megabench.data.batch import Batch, micro_batches
from megabench.data.source import open_source
from megabench.engines.build import build_engine
from megabench.engines.common.optim import LossScale
from megabench.specs.ddp import POWERSGD_PLAIN_STEPS
from tests import distributed
from tests.autotune.test_probe import SETTING, WORLD_SIZE, config
from tests.comparison.compare_process import finish, start, torchrun
from tests.doctor.test_examine import SMALL, look, only, tp, zero3
from tests.engines.equivalence import OPTIMIZERS, assert_equal_to_reference, resolve
from tests.engines.reference import Reference
from tests.engines.test_families import SMALL as SMALL_MODEL
from tests.engines.test_families import check_model_that_no_table_describes
from tests.engines.test_options import train_scaled
from tests.planner.jobs import costs, job
from tests.planner.test_data_parallel import FOUR, bytes_a_parameter, check_fragments, data_parallel, launch_seconds
from tests.planner.test_validation import measured_parts
from tests.train.callbacks.test_comm_volume import EXACT, PARAMETERS, counted


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "fields"), [(2, OPTIMIZERS["sgd"]), (4, OPTIMIZERS["adamw"])])
def test_equivalence(world_size: int, fields: dict[str, Any]) -> None:
    assert_equal_to_reference(world_size, engine="ddp", **fields)


@pytest.mark.distributed
def test_equivalence_with_recomputation() -> None:
    assert_equal_to_reference(2, engine="ddp", recompute="full", **OPTIMIZERS["adamw"])


def gradients_of_steps(run: ResolvedConfig, num_steps: int) -> list[dict[str, torch.Tensor]]:
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    gradients = []
    for step in range(num_steps):
        engine.accumulate(micro_batches(source, run, dist.get_rank(), step))
        gradients.append(dict(engine.full_tensors("gradients")))
        engine.update(run.lr)
    return gradients


def where_gradients_lie(run: ResolvedConfig) -> list[set[int]]:
    """The storages of DDP's gradients before each micro-batch but the first of all, and after the last."""
    engine: Any = build_engine(run, torch.device("cpu"))
    source = open_source(run)
    parameters = list(engine.model.parameters())
    seen = []

    def storages() -> set[int]:
        return {parameter.grad.untyped_storage().data_ptr() for parameter in parameters}

    class Spied(list[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            for batch in super().__iter__():
                if parameters[0].grad is not None:
                    seen.append(storages())
                yield batch

    for step in range(2):
        engine.accumulate(Spied(micro_batches(source, run, dist.get_rank(), step)))
        engine.update(run.lr)
    return [*seen, storages()]


def cut_graphs(run: ResolvedConfig) -> int:
    """How many graphs DDP's optimizer was given to cut at its buckets. They are traced, and not compiled further."""
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    with patch.object(DDPOptimizer, "compile_fn", autospec=True, side_effect=DDPOptimizer.compile_fn) as cut:
        engine.accumulate(micro_batches(source, run, dist.get_rank(), 0))
    return cut.call_count


@pytest.mark.distributed
def test_it_compiles_whole_blocks() -> None:
    """On GPUs a cut goes through Liger's and our own kernels, and fails."""
    run = resolve(2, engine="ddp", num_layers=1, compile=True, micro_batch=2)
    assert distributed.run(cut_graphs, 2, run) == [0, 0]


@pytest.mark.distributed
def test_it_holds_gradients_once() -> None:
    """They are summed up in the buckets that are reduced, from the first micro-batch on."""
    run = resolve(2, engine="ddp", num_layers=2, global_batch=12, micro_batch=2)
    seen = distributed.run(where_gradients_lie, 2, run)[0]
    assert len(seen) == 6
    assert max(map(len, seen)) <= 2, "more storages than buckets"


@pytest.mark.distributed
def test_power_sgd_projects() -> None:
    """Two plain steps, then matrices of low rank: the projection of the mean gradient onto that many directions."""
    run = resolve(2, engine="ddp", powersgd_rank=2, num_layers=1, **OPTIMIZERS["sgd"])
    steps = distributed.run(gradients_of_steps, 2, run, 3)[0]
    alone = resolve(1, engine="ddp", num_layers=1, **OPTIMIZERS["sgd"])
    reference, source = Reference(alone, torch.device("cpu")), open_source(alone)
    expected = [reference.step(micro_batches(source, alone, 0, step), run.lr)[2] for step in range(3)]
    for name, gradient in expected[2].items():
        for step in range(2):
            torch.testing.assert_close(steps[step][name], expected[step][name], rtol=1e-3, atol=1e-6)
        found = steps[2][name]
        if gradient.ndim == 1:  # vectors travel whole
            torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-6)
            continue
        directions, sizes, _ = torch.linalg.svd(found, full_matrices=False)
        assert sizes[2] < 1e-4 * sizes[0], f"{name} has a higher rank"
        projection = directions[:, :2] @ directions[:, :2].T @ gradient
        assert torch.dist(found, projection) < 1e-3 * gradient.norm(), name
        assert found.norm() < 0.99 * gradient.norm(), f"{name}: nothing was left out"


def overflow(run: ResolvedConfig) -> list[object]:
    """A step whose loss scale is beyond fp32, and the next."""
    from megabench.engines.ddp.engine import DdpEngine

    engine, source = DdpEngine(run, torch.device("cpu")), open_source(run)
    engine.loss_scale = LossScale(value=1e38, hysteresis=1)
    weights = dict(engine.full_tensors("weights"))
    skipped = engine.train_step(micro_batches(source, run, dist.get_rank(), 0), run.lr)
    same = all(torch.equal(weights[name], tensor) for name, tensor in engine.full_tensors("weights"))
    return [skipped.skipped, same, engine.loss_scale.value]


@pytest.mark.distributed
def test_an_overflow_skips_a_step() -> None:
    run = resolve(2, num_layers=1, engine="ddp", **OPTIMIZERS["adamw"])
    for skipped, same, value in distributed.run(overflow, 2, run):
        assert skipped and same and value == 5e37


def count_waits(run: ResolvedConfig) -> int:
    """How often a step reads a value from the device, on which the host would wait for a GPU."""

    class Counting(TorchDispatchMode):
        num_reads = 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num_reads += operation is torch.ops.aten._local_scalar_dense.default
            return operation(*args, **(kwargs or {}))

    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    batches = micro_batches(source, run, 0, 0)
    engine.accumulate(batches)
    with Counting() as counted:
        engine.accumulate(batches)
    return counted.num_reads


@pytest.mark.distributed
@pytest.mark.parametrize("model", ["llama-tiny", "qwen3-tiny", "gpt2-tiny", "bloom-tiny"])
def test_no_micro_batch_waits_for_the_gpu(model: str) -> None:
    run = resolve(1, model=model, engine="ddp", num_layers=2, global_batch=4, micro_batch=2)
    assert distributed.run(count_waits, 1, run) == [0]


@pytest.mark.distributed
def test_the_loss_scale_does_not_show() -> None:
    assert_equal_to_reference(2, job=train_scaled, engine="ddp", **OPTIMIZERS["adamw"])


@pytest.mark.distributed
def test_bloom_with_recomputation() -> None:
    fields: dict[str, Any] = {"engine": "ddp", "recompute": "full"}
    assert_equal_to_reference(2, model="bloom-tiny", num_layers=2, **fields, **OPTIMIZERS["adamw"])


@pytest.mark.distributed
def test_a_model_that_no_table_describes(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=2, attention_bias=True, hidden_act="gelu", **SMALL_MODEL)
    check_model_that_no_table_describes(tmp_path, config, "ddp")


def test_the_memory_of_gradients_held_twice_tells_nothing() -> None:
    measured = measured_parts()
    assert measured["qwen3-0.6b-dp", "ddp", True] == {"seconds"}
    assert measured["engines-bf16", "ddp", False] == {"seconds", "memory_gib"}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_reduces_every_gradient_once(world_size: int) -> None:
    share = 2 * (world_size - 1) / world_size
    assert counted(world_size, engine="ddp") == {"dp": pytest.approx(share * 4 * PARAMETERS, rel=EXACT)}


@pytest.mark.e2e
def test_what_is_compiled_stays_compiled_to_the_last_step(tmp_path):
    """What counts and watches a run must not make torch.compile give up."""
    flags = ["--model", "llama-tiny", "--num-layers", "1", "--engine", "ddp", "--compile", "--profile"]
    flags += ["--steps", "5", "--warmup-steps", "2", "--out", tmp_path]
    status, _, stderr = finish(start(torchrun(1, 1, *flags, script="launch/pretrain.py"), CUDA_VISIBLE_DEVICES=""))
    assert status == 0, stderr
    with gzip.open(tmp_path / "trace/rank-0.json.gz") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert any(name.startswith("Torch-Compiled Region") for name in names)


def test_a_model_too_small_for_sharding():
    found = only(look(zero3(**SMALL), tp(**SMALL)))
    assert found.kind == "slow" and found.trials == () and "plain DDP" in found.what
    assert "1.7 of 140 GiB per GPU; the trials are ZeRO-3, tp4·pp2" in found.evidence
    whole = zero3("ddp", engine="ddp", options={}, speeds=(7000.0, 7010.0, 7020.0), **SMALL)
    assert look(zero3(**SMALL), tp(**SMALL), whole) == []


def test_powersgd_is_timed_behind_its_plain_steps():
    short = probe_config(config(engine="ddp", powersgd_rank=4), SETTING, WORLD_SIZE, "cuda")
    assert (short.warmup_steps, short.steps) == (POWERSGD_PLAIN_STEPS + 1, POWERSGD_PLAIN_STEPS + 3)


def test_what_it_copies():
    assert bytes_a_parameter("ddp") == pytest.approx(6 + 6 + 12 - 12)  # weights cast, gradients cast and added
    assert bytes_a_parameter("ddp", recompute="full") == pytest.approx(bytes_a_parameter("ddp") + 6)
    assert bytes_a_parameter("ddp", work=job(precision="fp32")) == pytest.approx(12 - 12)


def test_it_waits_for_no_hooks():
    """ZeRO-0 has none either, and is what ZeRO-1 and ZeRO-3 are compared with."""
    assert launch_seconds("gpt2", 8, "ddp") == pytest.approx(launch_seconds("gpt2", 8, "deepspeed", 0))


def test_adafactor_is_planned_without_moments():
    candidate = data_parallel("ddp")
    adamw, adafactor = (costs(work, FOUR).estimate(candidate).memory for work in (job(), job(optimizer="adafactor")))
    assert adamw.optimizer - adafactor.optimizer == 8 * job().num_parameters
    assert adafactor.optimizer == 0


def test_muon_is_planned_with_one_moment_of_matrices_and_its_products():
    candidate = data_parallel("ddp")
    adamw, muon = (costs(work, FOUR).estimate(candidate) for work in (job(), job(optimizer="muon")))
    shape = job().shape
    hidden = shape.num_layers * shape.layer_matrix_parameters
    assert adamw.memory.optimizer - muon.memory.optimizer == pytest.approx(4 * hidden)
    assert muon.parts["optimizer"] > adamw.parts["optimizer"], "five steps of three products for each matrix"


def test_ddp_reduces_in_bf16_from_fp32_buckets():
    candidate = data_parallel("ddp")
    assert costs(job(bytes_of_gradient=2), FOUR).estimate(candidate).memory.gradients == 4 * job().num_parameters


@pytest.mark.parametrize(("recompute", "share"), [("none", 0.3), ("full", 0.1)])
def test_fragments_are_more_where_weights_are_cast(recompute: Recompute, share: float) -> None:
    """Whole models are cast at once, or a layer at a time."""
    check_fragments(data_parallel("ddp", recompute), share)
