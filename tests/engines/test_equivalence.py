"""Every layout and engine does what one process does: gradients, gradient norms, losses and updated weights."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megabench.config import ResolvedConfig
from tests import distributed
from tests.engines.cases import cases
from tests.engines.equivalence import OPTIMIZERS, Trace, assert_equal_to_reference, resolve, train

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "micro_batch": 2}),
    "tp4": (4, {"tp": 4, "micro_batch": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2-vp2": (2, {"pp": 2, "vp": 2}),
    "pp4": (4, {"pp": 4}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp2-dp2": (4, {"tp": 2}),
    "dp4": (4, {}),
    "cp2": (2, {"cp": 2, "micro_batch": 2}),
    "cp4": (4, {"cp": 4, "micro_batch": 2, "recompute": "selective"}),
    "cp3-chunks": (3, {"cp": 3, "seq_length": 48, "micro_batch": 2}),  # which do not divide the four KV heads
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2}),
    "pp2-five-layers": (2, {"pp": 2, "num_layers": 5}),
}
# beyond the layouts that both optimizers are run on
COMBINATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "pp3-uneven": (3, {"pp": 3}),
    "pp2-heavy-output": (2, {"pp": 2, "model": "llama-vocabulary"}),
    "pp2-vp2-heavy-output": (2, {"pp": 2, "vp": 2, "num_layers": 6, "model": "llama-vocabulary"}),
    "pp2-vp2-dp2": (4, {"pp": 2, "vp": 2}),
    "tp2-pp2-vp2": (4, {"tp": 2, "pp": 2, "vp": 2}),
    # the last chunk holds only the output layer, and with two chunks more than layers the first one only the embedding
    "pp2-vp2-three-layers": (2, {"pp": 2, "vp": 2, "num_layers": 3}),
    "pp2-vp3": (2, {"pp": 2, "vp": 3}),
    "tp2-pp2-vp3": (4, {"tp": 2, "pp": 2, "vp": 3, "recompute": "full"}),
    "pp2-vp3-dp2": (4, {"pp": 2, "vp": 3}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2, "micro_batch": 2}),
    "pp2-cp2": (4, {"pp": 2, "cp": 2}),
    "cp2-dp2": (4, {"cp": 2}),
    "pp2-vp2-cp2": (4, {"pp": 2, "vp": 2, "cp": 2}),
    "dp4-shards-of-2": (4, {"shard_size": 2}),
    "dp4-unsharded": (4, {"shard_size": 1}),
    "tp2-dp4-shards-of-4": (8, {"tp": 2, "shard_size": 4, "global_batch": 8}),
    "pp2-vp2-dp4-shards-of-2": (8, {"pp": 2, "vp": 2, "shard_size": 2, "global_batch": 8}),
    "cp2-dp2-shards-of-2": (4, {"cp": 2, "shard_size": 2}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron(layout: str, optimizer: str) -> None:
    world_size, fields = LAYOUTS[layout]
    assert_equal_to_reference(world_size, **fields, **OPTIMIZERS[optimizer])


@pytest.mark.parametrize("layout", COMBINATIONS)
def test_megatron_combinations(layout: str) -> None:
    world_size, fields = COMBINATIONS[layout]
    assert_equal_to_reference(world_size, **fields, **OPTIMIZERS["adamw"])


def train_in_many_buckets(run: ResolvedConfig) -> Trace:
    """With gradients and weights that travel in many parts, as those of a large model do."""
    from megabench.engines.megatron import engine

    with patch.multiple(engine, BUCKET_SIZE=20_000, BUCKET_SIZE_PER_RANK=0):
        return train(run)


@pytest.mark.parametrize("fields", [{}, {"pp": 2, "vp": 2}], ids=["dp2", "pp2-vp2-dp2"])
def test_megatron_many_buckets(fields: dict[str, Any]) -> None:
    fields = {**fields, **OPTIMIZERS["adamw"]}
    assert_equal_to_reference(4 if "pp" in fields else 2, job=train_in_many_buckets, **fields)


@pytest.mark.parametrize("fields", [{"pp": 2, "vp": 2}, {"cp": 2}, {"recompute": "full"}], ids=str)
def test_megatron_keeps_what_it_gathered(fields: dict[str, Any]) -> None:
    size = 2 * fields.get("pp", 1) * fields.get("cp", 1)
    assert_equal_to_reference(size, tp=2, keep_gathered=True, **fields, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_megatron_recompute(recompute: str) -> None:
    assert_equal_to_reference(2, tp=2, micro_batch=2, recompute=recompute)


def count_attentions(run: ResolvedConfig) -> int:
    """How often attention is computed in one step."""
    from megabench.engines.megatron.blocks import CausalAttention

    with patch.object(CausalAttention, "forward", autospec=True, side_effect=CausalAttention.forward) as forward:
        train(run, num_steps=1)
    return forward.call_count


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 2), ("full", 2)])
def test_recompute_computes_again(recompute: str, times: int) -> None:
    run = resolve(1, recompute=recompute)
    per_forward = run.shape.num_layers * run.num_micro_batches
    assert distributed.run(count_attentions, 1, run) == [times * per_forward]


def test_megatron_larger_micro_batch() -> None:
    assert_equal_to_reference(4, tp=2, pp=2, micro_batch=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_deepspeed(zero_stage: int, optimizer: str) -> None:
    assert_equal_to_reference(2, engine="deepspeed", zero_stage=zero_stage, **OPTIMIZERS[optimizer])


@pytest.mark.parametrize(("zero_stage", "recompute"), [(0, "none"), (3, "full")])
def test_deepspeed_otherwise(zero_stage: int, recompute: str) -> None:
    assert_equal_to_reference(2, engine="deepspeed", zero_stage=zero_stage, recompute=recompute, **OPTIMIZERS["adamw"])


FSDP: dict[str, tuple[int, dict[str, Any]]] = {
    "sgd": (2, {"optimizer": "sgd", "lr": 0.05}),
    "adamw": (4, {**OPTIMIZERS["adamw"]}),
    "hybrid": (4, {**OPTIMIZERS["adamw"], "shard_size": 2}),
    "replicated": (2, {**OPTIMIZERS["adamw"], "shard_size": 1}),
    "kept": (2, {**OPTIMIZERS["adamw"], "reshard_after_forward": False, "micro_batch": 2}),
    "recompute": (2, {**OPTIMIZERS["adamw"], "recompute": "full"}),
}


@pytest.mark.parametrize("options", FSDP)
def test_fsdp(options: str) -> None:
    world_size, fields = FSDP[options]
    assert_equal_to_reference(world_size, engine="fsdp", **fields)


@pytest.mark.parametrize(
    ("world_size", "fields"), [(4, {"tp": 2, "pp": 2, "model": "llama-odd"}), (2, {"engine": "deepspeed"})]
)
def test_reference_kernels(world_size: int, fields: dict[str, Any]) -> None:
    assert_equal_to_reference(world_size, kernels="reference", **fields, **OPTIMIZERS["adamw"])


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_bf16_engines_agree(grad_dtype: str) -> None:
    runs = [
        resolve(2, precision="bf16", grad_dtype=grad_dtype, **OPTIMIZERS["adamw"], **fields)
        for fields in cases("IN_BF16").values()
    ]
    losses = [torch.tensor(distributed.run(train, 2, run)[0].losses) for run in runs]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-3, atol=0.0)
