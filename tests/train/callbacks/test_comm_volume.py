"""Bytes on the wire, counted, against what the algorithms must send."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabench.config import ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.build import build_engine
from megabench.engines.deepspeed.engine import deepspeed_settings
from megabench.parallel.layout import Layout
from megabench.runtime.peer_copies import count_copy
from megabench.train.callbacks.comm_volume import CommVolume, SentBytes
from tests import distributed
from tests.engines.equivalence import resolve

pytestmark = pytest.mark.distributed

SMALL: dict[str, Any] = {"num_layers": 2, "optimizer": "sgd", "micro_batch": 1, "global_batch": 8}
PARAMETERS = resolve(1, **SMALL).shape.num_parameters
EXACT = 0.01  # norms, losses and padding


def count(run: ResolvedConfig) -> Counter[str]:
    """What a rank sends in the second step."""
    engine, source = build_engine(run, torch.device("cpu")), open_source(run)
    dp_rank = run.layout.coordinates(dist.get_rank()).dp
    engine.train_step(micro_batches(source, run, dp_rank, 0), run.lr)
    with SentBytes(run.layout) as counted:
        engine.train_step(micro_batches(source, run, dp_rank, 1), run.lr)
    return counted.sent


def counted(world_size: int, **fields: Any) -> dict[str, float]:
    run = resolve(world_size, **SMALL | fields)
    by_rank = distributed.run(count, world_size, run)
    return CommVolume(run.layout, first_step=1, warmup_steps=2).section(by_rank)["wire_bytes"]


def test_copies_between_gpus_count() -> None:
    count_copy((0, 1), 5)
    with SentBytes(Layout(tp=2, pp=2).with_world_size(4)) as counted:
        count_copy((0, 1), 100)
        count_copy((0, 2), 30)
    assert counted.sent == {"tp": 100, "pp": 30}


def test_the_distributed_optimizer_scatters_and_gathers() -> None:
    sent = counted(2)
    assert sent["dp"] == pytest.approx(2 * (1 / 2) * 4 * PARAMETERS, rel=EXACT)


def test_fsdp_gathers_twice_and_scatters_once_a_micro_batch() -> None:
    one, four = (counted(2, engine="fsdp", micro_batch=size)["dp"] for size in (4, 1))
    # the embedding, norm and output layer stay whole between forward and backward
    root = 4 * (2 * 512 * 128 + 128) / 2
    assert one == pytest.approx(3 / 2 * 4 * PARAMETERS - root, rel=EXACT)
    assert four == pytest.approx(4 * one, rel=EXACT)


def test_fsdp_gathers_weights_once_that_are_kept() -> None:
    kept = counted(2, engine="fsdp", micro_batch=4, reshard_after_forward=False)["dp"]
    assert kept == pytest.approx(2 * (1 / 2) * 4 * PARAMETERS, rel=EXACT)


@pytest.mark.parametrize("fields", [{}, {"zero_leaf_layers": True, "zero_prefetch": 10**8}, {"recompute": "full"}])
def test_zero3_gathers_weights_once_that_are_kept(tmp_path: Path, fields: dict[str, Any]) -> None:
    never = tmp_path / "never.json"  # so small a model is kept by DeepSpeed's defaults, too
    never.write_text('{"zero_optimization": {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}}')
    zero3 = {"engine": "deepspeed", "zero_persistence": 0, "micro_batch": 4} | fields
    kept = counted(2, **zero3, reshard_after_forward=False)["dp"]
    assert kept == pytest.approx(2 * (1 / 2) * 4 * PARAMETERS, rel=EXACT)
    assert counted(2, **zero3, deepspeed_config=never)["dp"] > 1.2 * kept


def test_zero2_can_reduce_each_gradient_to_its_owner() -> None:
    """Half of it is sent there, and half of the weights back; by default every rank gets the sum of whole buckets."""
    settings = Path(__file__).parents[3] / "configs/deepspeed/reduce-to-owner.json"
    zero2 = {"engine": "deepspeed", "zero_stage": 2, "micro_batch": 4}
    assert counted(2, **zero2, deepspeed_config=settings)["dp"] == pytest.approx(4 * PARAMETERS, rel=EXACT)
    assert counted(2, **zero2)["dp"] > 5.9 * PARAMETERS


def test_far_apart_weights_are_kept_until_backward() -> None:
    settings = [
        deepspeed_settings(
            resolve(1, model="llama3-8b", num_layers=32, engine="deepspeed", reshard_after_forward=drops)
        )
        for drops in (True, False)
    ]
    distances = [setting["zero_optimization"].get("stage3_max_reuse_distance", 0) for setting in settings]
    assert distances[0] == 0 and distances[1] > 3 * 8e9


def test_replicas_of_shards_are_reduced_once_a_step() -> None:
    one, four = (counted(2, engine="fsdp", shard_size=1, micro_batch=size)["dp"] for size in (4, 1))
    assert one == pytest.approx(2 * (1 / 2) * 4 * PARAMETERS, rel=EXACT)
    assert four == pytest.approx(one, rel=EXACT)


def test_zero3_sends_more_with_more_micro_batches_and_tp_does_not() -> None:
    zero = [counted(2, engine="deepspeed", zero_persistence=0, micro_batch=size)["dp"] for size in (4, 1)]
    assert zero[1] > 3.5 * zero[0]
    tensor = [counted(2, tp=2, micro_batch=size)["tp"] for size in (4, 1)]
    assert tensor[0] == pytest.approx(tensor[1], rel=0.05)


def test_kept_gathers_are_a_fifth_of_tp() -> None:
    run = resolve(2, **SMALL, tp=2)
    hidden = run.global_batch * run.seq_length * run.shape.hidden_size * 4
    again = run.shape.num_layers * 2 * hidden / 2  # what attention and MLP gather; half of it lies on the other rank
    all_ten = 5 * again
    sent, kept = (counted(2, tp=2, keep_gathered=keeps)["tp"] for keeps in (False, True))
    assert sent - kept == pytest.approx(again, rel=EXACT)
    assert all_ten < sent < 1.5 * all_ten  # embedding and output layer besides


def test_a_pipeline_sends_hidden_states() -> None:
    sent = counted(2, pp=2)
    run = resolve(2, **SMALL, pp=2)
    hidden = run.global_batch * run.seq_length * run.shape.hidden_size * 4
    # the first stage sends it forward, the last its gradient back: each rank once
    assert sent["pp"] == pytest.approx(hidden, rel=EXACT)


def test_context_parallel_ranks_exchange_heads() -> None:
    run = resolve(2, **SMALL, cp=2)
    tokens = run.global_batch * run.seq_length / 2 * run.shape.head_dim * 4  # one head's bytes of a rank's tokens
    half = 1 / 2  # of the heads are another rank's
    # queries, keys and values there, what attention made of them back, and the gradients of all
    exchanged = run.shape.num_layers * 2 * 2 * (run.shape.num_heads + run.shape.num_kv_heads) * tokens * half
    optimizer = 2 * half * 4 * PARAMETERS
    assert counted(2, cp=2)["cp"] == pytest.approx(exchanged + optimizer, rel=0.02)


def test_context_parallel_ranks_gather_keys_and_values_where_heads_cannot_be_dealt_out() -> None:
    fields = {"seq_length": 48, "global_batch": 6, "cp": 3}
    run = resolve(3, **SMALL | fields)
    assert run.shape.num_kv_heads % 3
    keys = run.global_batch * run.seq_length * run.shape.num_kv_heads * run.shape.head_dim * 4
    others = 2 / 3  # of what is gathered lies on other ranks
    gathered = run.shape.num_layers * 2 * keys * others  # keys and values; their gradients are scattered back
    optimizer = 2 * others * 4 * PARAMETERS
    assert counted(3, **fields)["cp"] == pytest.approx(2 * gathered + optimizer, rel=0.02)
