"""The engines' own settings: what changes no result is equal to one process, what is lossy has a class of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from megabench.config import ConfigError, ResolvedConfig
from megabench.data.batch import Batch, micro_batches
from megabench.data.source import open_source
from megabench.engines.build import build_engine
from megabench.engines.common.loss_scale import HYSTERESIS, INITIAL, WINDOW, LossScale
from tests import distributed
from tests.engines.equivalence import (
    OPTIMIZERS,
    Trace,
    assert_equal_to_reference,
    differences,
    reference_of,
    resolve,
    train,
)
from tests.engines.reference import Reference

CONFIGS = Path(__file__).parents[2] / "configs"
EQUAL: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2-reduce": (
        4,
        {"engine": "deepspeed", "zero_stage": 2, "deepspeed_config": CONFIGS / "deepspeed/reduce-to-owner.json"},
    ),
    "zero3-offload-all": (2, {"engine": "deepspeed", "zero_stage": 3, "offload": "all"}),
    "zero3-offload-optimizer": (2, {"engine": "deepspeed", "zero_stage": 3, "offload": "optimizer"}),
    "zero2-offload": (2, {"engine": "deepspeed", "zero_stage": 2, "offload": "optimizer"}),
    "zero1-offload": (2, {"engine": "deepspeed", "zero_stage": 1, "offload": "optimizer"}),
    "zero3-hpz": (4, {"engine": "deepspeed", "hpz_size": 2}),
    "zero3-tuned": (2, {"engine": "deepspeed", "zero_prefetch": 1000, "zero_persistence": 100}),
    "zero3-leaf": (2, {"engine": "deepspeed", "zero_leaf_layers": True, "zero_prefetch": 1000, "recompute": "full"}),
    "zero3-leaf-hpz": (4, {"engine": "deepspeed", "zero_leaf_layers": True, "hpz_size": 2}),
    "zero3-kept": (2, {"engine": "deepspeed", "reshard_after_forward": False, "micro_batch": 2}),
    "zero3-leaf-kept": (2, {"engine": "deepspeed", "zero_leaf_layers": True, "reshard_after_forward": False}),
    "zero3-leaf-offload": (2, {"engine": "deepspeed", "zero_leaf_layers": True, "offload": "all"}),
    "fsdp-offload": (2, {"engine": "fsdp", "offload": "all"}),
    "fsdp-compile": (2, {"engine": "fsdp", "compile": True, "num_layers": 1}),
    "ddp-compile": (2, {"engine": "ddp", "compile": True, "num_layers": 1}),
}


@pytest.mark.distributed
@pytest.mark.parametrize("option", EQUAL)
def test_what_changes_no_result(option: str) -> None:
    world_size, fields = EQUAL[option]
    assert_equal_to_reference(world_size, **fields, **OPTIMIZERS["adamw"])


@pytest.mark.distributed
@pytest.mark.parametrize("engine", [{"engine": "ddp"}, {"engine": "deepspeed", "zero_stage": 0}])
def test_adafactor(engine: dict[str, Any]) -> None:
    assert_equal_to_reference(2, **engine, optimizer="adafactor", lr=1e-2)


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
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
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


def cut_graphs(run: ResolvedConfig) -> int:
    """How many compiled graphs DDP's optimizer was given to cut at its buckets."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    with patch.object(DDPOptimizer, "compile_fn", autospec=True, side_effect=DDPOptimizer.compile_fn) as cut:
        engine.accumulate(micro_batches(source, run, dist.get_rank(), 0))
    return cut.call_count


@pytest.mark.distributed
def test_ddp_compiles_whole_blocks() -> None:
    """On GPUs a cut goes through Liger's and our own kernels, and fails."""
    run = resolve(2, engine="ddp", num_layers=1, compile=True, micro_batch=2)
    assert distributed.run(cut_graphs, 2, run) == [0, 0]


@pytest.mark.distributed
def test_ddp_holds_gradients_once() -> None:
    """They are summed up in the buckets that are reduced, from the first micro-batch on."""
    run = resolve(2, engine="ddp", num_layers=2, global_batch=12, micro_batch=2)
    seen = distributed.run(where_gradients_lie, 2, run)[0]
    assert len(seen) == 6
    assert max(map(len, seen)) <= 2, "more storages than buckets"


def gradients_kept(run: ResolvedConfig) -> int:
    """How many of a step's gradients FSDP2 still holds when the next one computes."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    engine.train_step(micro_batches(source, run, dist.get_rank(), 0), run.lr)
    kept = []

    class Spied(list[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            parameters = [*engine.shards.values(), *engine.model.parameters()]
            kept.append(sum(parameter.grad is not None for parameter in parameters))
            yield from super().__iter__()

    engine.accumulate(Spied(micro_batches(source, run, dist.get_rank(), 1)))
    return kept[0]


@pytest.mark.distributed
def test_fsdp_holds_gradients_once() -> None:
    assert distributed.run(gradients_kept, 2, resolve(2, engine="fsdp", num_layers=1)) == [0, 0]


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


def test_the_loss_scale_moves() -> None:
    scale = LossScale()
    for _ in range(HYSTERESIS - 1):
        scale.update(is_finite=False)
    assert scale.value == INITIAL
    scale.update(is_finite=False)
    assert scale.value == INITIAL / 2
    for _ in range(WINDOW):
        scale.update(is_finite=True)
    assert scale.value == INITIAL
    scale.update(is_finite=False)
    assert scale.value == INITIAL, "patient again after a window without"
    other = LossScale()
    other.restore(scale.state())
    assert other == scale


def train_scaled(run: ResolvedConfig) -> Trace:
    """Trains in fp32 with fp16's loss scale, which must not show."""
    from unittest.mock import patch

    from megabench.engines.common import transformers_model

    with patch.object(transformers_model, "loss_scale_of", lambda run: LossScale()):
        return train(run)


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "fields"), [(2, {}), (4, {"cp": 2, "pp": 2})], ids=["dp2", "pp2-cp2"])
def test_megatron_in_fp16(world_size: int, fields: dict[str, Any]) -> None:
    """Its loss is scaled and divided by micro-batches, its gradients are divided by replicas and unscaled."""
    settings = fields | OPTIMIZERS["adamw"]
    # which a user may ask for on GPUs alone
    run = resolve(world_size, **settings).model_copy(update={"precision": "fp16"})
    found = differences(distributed.run(train, world_size, run)[0], reference_of(**settings))
    assert max(value for name, value in found.items() if name.startswith("gradients")) < 5e-3


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["fsdp", "ddp"])
def test_the_loss_scale_does_not_show(engine: str) -> None:
    assert_equal_to_reference(2, job=train_scaled, engine=engine, **OPTIMIZERS["adamw"])


def fsdp_units(run: ResolvedConfig) -> list[str]:
    engine: Any = build_engine(run, torch.device("cpu"))
    return [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.distributed
def test_fsdp_gathers_the_output_layer_by_itself() -> None:
    """So that it is gathered beside blocks, and its gradient reduced before theirs; a tied one is with the rest."""
    own, tied = (resolve(2, engine="fsdp", num_layers=1, model=model) for model in ("llama-tiny", "gpt2-tiny"))
    assert tied.shape.tied_embeddings
    assert sorted(distributed.run(fsdp_units, 2, own)[0]) == ["", "lm_head", "model.embed_tokens", "model.layers.0"]
    assert sorted(distributed.run(fsdp_units, 2, tied)[0]) == ["", "transformer.h.0"]


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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engine": "ddp", "offload": "all"}, "offload is a setting of the deepspeed and fsdp engines"),
        ({"engine": "fsdp", "offload": "optimizer"}, "use offload=all"),
        ({"engine": "deepspeed", "zero_stage": 2, "offload": "all"}, "offload=all needs zero_stage=3"),
        ({"engine": "deepspeed", "zero_stage": 0, "offload": "optimizer"}, "needs zero_stage 1 to 3"),
        ({"engine": "deepspeed", "zero_stage": 2, "hpz_size": 2}, "hpz_size=2 is a setting of zero_stage=3, not 2"),
        ({"engine": "deepspeed", "zero_stage": 1, "zero_leaf_layers": True}, "is a setting of zero_stage=3, not 1"),
        ({"zero_leaf_layers": True}, "zero_leaf_layers is a setting of the deepspeed engine"),
        ({"engine": "deepspeed", "hpz_size": 3}, "hpz_size=3 does not divide the 4 ranks"),
        ({"optimizer": "adafactor"}, "needs whole matrices on every rank, and the megatron engine cuts them"),
        ({"engine": "deepspeed", "optimizer": "adafactor"}, "ZeRO-3 of the deepspeed engine cuts them"),
        ({"engine": "fsdp", "powersgd_rank": 2}, "powersgd_rank is a setting of the ddp engine"),
        ({"engine": "ddp", "precision": "bf16", "grad_dtype": "bf16", "powersgd_rank": 2}, "PowerSGD sends fp32"),
        ({"engine": "ddp", "powersgd_rank": 2, "save": Path("x")}, "do not hold what PowerSGD has left unsent"),
        ({"keep_gathered": True}, "it needs tp=2 or more and kernels=auto"),
        ({"tp": 2, "keep_gathered": True, "kernels": "reference"}, "it needs tp=2 or more and kernels=auto"),
        ({"compile": True}, "compile is a setting of the fsdp and ddp engines, and the engine is megatron"),
    ],
)
def test_what_cannot_be_combined(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(4, **fields)
