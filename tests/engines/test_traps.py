"""Each trap of megatron-core that the engine steps around, with the way around it taken out: the comparison must fail.

These are the negative controls of test_equivalence.py, which holds the same layouts to the reference.
"""

import queue
import re
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megabench.config import ResolvedConfig
from tests import distributed
from tests.engines import equivalence
from tests.engines.equivalence import TOLERANCE, Trace, differences, reference_of, resolve, train, worst

pytestmark = pytest.mark.distributed


def _loss_as_two() -> Any:
    """The mean loss under the older interface (trap 2)."""
    return _older_loss(lambda mean: mean.detach().clone())


def _aliased_report() -> Any:
    """The same, reported without a copy: the schedule divides it in place (trap 1)."""
    return _older_loss(lambda mean: mean.detach())


class _Report:
    """A reported loss that is read when the step is over."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    def __radd__(self, total: Tensor) -> Tensor:
        return total + torch.stack([self.loss.double(), torch.tensor(1.0).double()])


@contextmanager
def _older_loss(report: Callable[[Tensor], Tensor]) -> Any:
    from megabench.engines.megatron.engine import MegatronEngine

    def loss(self: Any, token_losses: Tensor) -> tuple[Tensor, _Report]:
        mean = token_losses.mean()
        return mean, _Report(report(mean))

    with patch.object(MegatronEngine, "_loss", loss), _config(calculate_per_token_loss=False)():
        yield


def _config(**changes: Any) -> Callable[[], Any]:
    """megatron-core's configuration with some fields put back to what the engine avoids."""

    @contextmanager
    def changed() -> Any:
        from megabench.engines.megatron import engine

        build = engine.transformer_config
        with patch.object(engine, "transformer_config", lambda run: replace(build(run), **changes)):
            yield

    return changed


def _unmarked_norms() -> Any:
    """Norm weights without their sequence-parallel mark (trap 4)."""
    from megabench.engines.megatron.blocks import RMSNorm

    original = RMSNorm.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.weight.sequence_parallel = False

    return patch.object(RMSNorm, "__init__", init)


def _built_in_attention() -> Any:
    """megatron-core's own core attention (trap 5)."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megabench.engines.megatron import blocks

    return patch.object(blocks, "CausalAttention", DotProductAttention)


def _unseeded() -> Any:
    """No random state for model-parallel regions (trap 6)."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megabench.engines.megatron import engine

    @contextmanager
    def without() -> Any:
        get_cuda_rng_tracker().reset()
        with patch.object(engine, "model_parallel_cuda_manual_seed", lambda seed: None):
            yield

    return without()


def _unmasked_padding() -> Any:
    """Padded vocabulary rows that take part in the softmax."""
    from megabench.engines.megatron.model import ParallelLlama

    original = ParallelLlama.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.num_real_rows = self.vocab_size

    return patch.object(ParallelLlama, "__init__", init)


def _trained_padding() -> Any:
    """An embedding that trains the row of the padding token, which transformers' embedding does not train."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    from megabench.engines.megatron.ends import ParallelEmbedding

    return patch.object(ParallelEmbedding, "forward", VocabParallelEmbedding.forward)


def _same_data_everywhere() -> Any:
    """Every replica reads what the first one reads."""
    original = equivalence.micro_batches
    return patch.object(equivalence, "micro_batches", lambda source, run, dp_rank, step: original(source, run, 0, step))


def _unmarked_parts() -> Any:
    """Weights that are not marked as split over tp, so that the norm counts only those of the first tp rank."""
    from megabench.engines.megatron.model import ParallelLlama

    original = ParallelLlama.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.tensor_model_parallel = False

    return patch.object(ParallelLlama, "__init__", init)


def _separate_copies() -> Any:
    """Copies of the optimizer state that never sum their gradients."""
    from megabench.engines.megatron import engine

    original = engine.DistributedDataParallel

    def alone(*args: Any, pg_collection: Any, **fields: Any) -> Any:
        wrapped = original(*args, pg_collection=pg_collection, **fields)
        for group in wrapped.bucket_groups:
            group.inter_distributed_optimizer_instance_group = pg_collection.tp  # one rank
        return wrapped

    return patch.object(engine, "DistributedDataParallel", alone)


def _torch_adam() -> Any:
    """torch's own AdamW, as megatron-core takes it by itself (trap 7)."""
    from megatron.core.optimizer import distrib_optimizer

    from megabench.engines.megatron import optimizer

    @contextmanager
    def original() -> Any:
        with (
            patch.object(optimizer, "GroupStepAdamW", torch.optim.AdamW),
            patch.object(optimizer, "_accept_group_step", lambda: None),
            patch.object(distrib_optimizer, "Adam", torch.optim.AdamW),
            patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", False),
            patch.object(distrib_optimizer, "USING_APEX_OPTIMIZER", False),
        ):
            yield

    return original()


BREAKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "aliased report": _aliased_report,
    "loss as a 2-tuple": _loss_as_two,
    "batched p2p": _config(overlap_p2p_comm=False, batch_p2p_comm=True),
    "unmarked norms": _unmarked_norms,
    "built-in attention": _built_in_attention,
    "unseeded": _unseeded,
    "waits at messages": _config(batch_p2p_sync=True),
    "megatron-core's own stages": _config(pipeline_model_parallel_layout=None),
    "unmasked padding": _unmasked_padding,
    "trained padding": _trained_padding,
    "same data everywhere": _same_data_everywhere,
    "no tp marks": _unmarked_parts,
    "separate copies": _separate_copies,
    "torch's Adam": _torch_adam,
}


def train_broken(run: ResolvedConfig, what: str) -> Trace:
    with BREAKS[what]():
        return train(run, num_steps=1)


def failure_of(function: Callable[..., Any], *args: Any) -> str:
    """What `function` raises on this rank, "" for nothing; for failures that leave no other rank waiting."""
    try:
        function(*args)
    except Exception:
        return traceback.format_exc()
    return ""


def compare_broken(world_size: int, what: str, **fields: Any) -> dict[str, float]:
    """The differences after one step with `what` broken; tensors alone when the loss is as it should be."""
    traces = distributed.run(train_broken, world_size, resolve(world_size, **fields), what)
    reference = reference_of(**fields)
    first = replace(reference, losses=reference.losses[:1], grad_norms=reference.grad_norms[:1], weights={})
    return differences(replace(traces[0], weights={}), first)


@pytest.mark.parametrize(
    ("what", "world_size", "fields"),
    [
        ("aliased report", 1, {}),
        ("loss as a 2-tuple", 2, {"cp": 2, "kernels": "reference"}),
        ("batched p2p", 2, {"pp": 2, "vp": 2}),
        ("unmarked norms", 2, {"tp": 2}),
        ("unmasked padding", 2, {"tp": 2, "model": "llama-odd"}),
        ("trained padding", 2, {"tp": 2, "model": "llama-padded"}),
        ("no tp marks", 2, {"tp": 2}),
        ("separate copies", 4, {"shard_size": 2}),
        ("same data everywhere", 2, {}),
        ("same data everywhere", 2, {"engine": "deepspeed", "zero_stage": 3}),
    ],
)
def test_comparison_sees(what: str, world_size: int, fields: dict[str, Any]) -> None:
    name, difference = worst(compare_broken(world_size, what, **fields))
    assert difference > 10 * TOLERANCE, f"worst is {name} with {difference:.1e}"


def test_the_fused_loss_refuses_a_loss_as_a_2_tuple() -> None:
    """megatron-core would multiply the loss by cp after the gradient of the output layer has been added."""
    run = resolve(2, cp=2)
    with pytest.raises(distributed.DistributedTestError, match="Expected Tensor with single nonzero value"):
        distributed.run(train_broken, 2, run, "loss as a 2-tuple")


def test_unmarked_norms_leave_the_loss_as_it_is() -> None:
    found = compare_broken(2, "unmarked norms", tp=2)
    assert found["losses"] < TOLERANCE, "which is why gradients are compared, not losses"


def test_an_aliased_report_is_a_wrong_loss() -> None:
    assert compare_broken(1, "aliased report")["losses"] > 0.1


def test_vocabulary_that_does_not_divide() -> None:
    equivalence.assert_equal_to_reference(2, tp=2, model="llama-odd")


@pytest.mark.parametrize(
    ("what", "world_size", "fields", "words"),
    [
        ("built-in attention", 2, {"cp": 2}, "[Cc]ontext parallelism is only supported by TEDotProductAttention"),
        ("unseeded", 2, {"tp": 2}, "cuda rng state model-parallel-rng is not added"),
    ],
)
def test_engine_cannot_even_run(what: str, world_size: int, fields: dict[str, Any], words: str) -> None:
    failures = distributed.run(failure_of, world_size, train_broken, resolve(world_size, **fields), what)
    assert all(re.search(words, failure) for failure in failures), failures


class _Largest(TorchDispatchMode):
    """The element count of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def waits_for_the_device(run: ResolvedConfig, what: str | None) -> int:
    train(run, 1)  # what stands in for CUDA on CPU is in place from here on
    with BREAKS[what]() if what else nullcontext(), patch.object(torch.cuda, "synchronize") as waits:
        train(run, 1)
    return waits.call_count


def test_a_pipeline_does_not_wait_at_every_message() -> None:
    run = resolve(2, pp=2)
    assert distributed.run(waits_for_the_device, 2, run, None) == [0, 0]
    assert min(distributed.run(waits_for_the_device, 2, run, "waits at messages")) > 0


def largest_tensor_of_attention(run: ResolvedConfig, what: str | None) -> int:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megabench.engines.megatron import blocks
    from megabench.engines.megatron.model import create_process_groups, transformer_config

    groups = create_process_groups(run.layout)
    model_parallel_cuda_manual_seed(1)  # the built-in one draws its dropout from there
    shape, length = run.shape, run.seq_length
    with BREAKS[what]() if what else nullcontext():
        attention = blocks.CausalAttention(
            transformer_config(run), 1, blocks.AttnMaskType.causal, "self", pg_collection=groups
        )
        query = torch.randn(length, 1, shape.num_heads, shape.head_dim)
        key, value = torch.randn(2, length, 1, shape.num_kv_heads, shape.head_dim)
        with _Largest() as largest:
            attention(query, key, value, None)
    return largest.numel


def test_attention_keeps_no_scores() -> None:
    run = resolve(1, seq_length=256)
    scores = run.shape.num_heads * run.seq_length**2
    assert distributed.run(largest_tensor_of_attention, 1, run, None)[0] < scores
    assert distributed.run(largest_tensor_of_attention, 1, run, "built-in attention")[0] >= scores


def layers_built(run: ResolvedConfig, what: str | None) -> list[int]:
    """The layers this rank really built, by their number in the model."""
    from megabench.engines.megatron.engine import MegatronEngine

    with BREAKS[what]() if what else nullcontext():
        engine = MegatronEngine(run, torch.device("cpu"))
    numbers = []
    for chunk in engine.chunks:
        assert len(chunk.module.decoder.layers) == len(chunk.module.layers)
        # megatron-core counts from 1
        assert [layer.layer_number - 1 for layer in chunk.module.decoder.layers] == list(chunk.module.layers)
        numbers += chunk.module.layers
    return numbers


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [(2, {"pp": 2, "num_layers": 5}), (3, {"pp": 3}), (2, {"pp": 2, "vp": 2, "num_layers": 7})],
)
def test_every_layer_is_built_once(world_size: int, fields: dict[str, Any]) -> None:
    run = resolve(world_size, **fields)
    built = [layer for layers in distributed.run(layers_built, world_size, run, None) for layer in layers]
    assert sorted(built) == list(range(run.shape.num_layers))
    failures = distributed.run(failure_of, world_size, layers_built, run, "megatron-core's own stages")
    assert any("AssertionError" in failure for failure in failures), failures


def reload_optimizer(run: ResolvedConfig, folder: str, what: str | None) -> list[int]:
    """Saves a sharded checkpoint after a step, loads it into a fresh optimizer, and returns its step counts."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megabench.data.batch import micro_batches
    from megabench.data.source import open_source
    from megabench.engines.megatron.engine import MegatronEngine

    def state(engine: MegatronEngine, is_loading: bool) -> dict[str, Any]:
        model = engine.chunks[0].sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        return {"optimizer": engine.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}

    # the saver would start a process to hold the queue of its results
    is_old = hasattr(filesystem_async, "_get_write_results_queue")
    get_queue = "_get_write_results_queue" if is_old else "get_write_results_queue"
    with (
        patch.object(filesystem_async, get_queue, return_value=queue.Queue()),
        BREAKS[what]() if what else nullcontext(),
    ):
        engine = MegatronEngine(run, torch.device("cpu"))
        engine.train_step(micro_batches(open_source(run), run, 0, 0), run.lr)
        dist_checkpointing.save(state(engine, is_loading=False), folder)
        values = [(group["weight_decay"], group["lr_scale"]) for group in engine.optimizer.param_groups]
        engine.optimizer.optimizer.state.clear()  # as in a process that has just started
        for group in engine.optimizer.param_groups:
            group.pop("step", None)
        engine.optimizer.load_state_dict(dist_checkpointing.load(state(engine, is_loading=True), folder)["optimizer"])
        assert values == [(group["weight_decay"], group["lr_scale"]) for group in engine.optimizer.param_groups]
        return [group["step"] for group in engine.optimizer.param_groups if group["params"]]


def test_optimizer_state_can_be_loaded(tmp_path: Path) -> None:
    run = resolve(2, optimizer="adamw")
    folders = [tmp_path / name for name in ("ours", "torch")]
    for folder in folders:
        folder.mkdir()
    for steps in distributed.run(reload_optimizer, 2, run, str(folders[0]), None):
        assert set(steps) == {1}
    failures = distributed.run(failure_of, 2, reload_optimizer, run, str(folders[1]), "torch's Adam")
    assert all("distrib_optimizer.py" in failure and "step" in failure for failure in failures), failures
