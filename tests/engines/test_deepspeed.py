"""What is DeepSpeed's alone: its settings, the user's own file, and rotary frequencies in half precision."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.config.record_fields import identity
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.specs.deepspeed import DeepSpeedSettings
from tests import distributed
from tests.engines.equivalence import resolve, train


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_settings_follow_the_run() -> None:
    from megabench.engines.deepspeed.engine import deepspeed_settings

    run = resolve(2, engine="deepspeed", zero_stage=2, micro_batch=2, global_batch=8, clip_grad=0.5)
    settings = deepspeed_settings(run)
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["train_batch_size"] == 8
    assert settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"]["stage"] == 2
    assert settings["data_types"]["grad_accum_dtype"] == settings["communication_data_type"] == "fp32"


def test_fp16_begins_as_with_every_engine() -> None:
    from megabench.engines.common.optim import LossScale
    from megabench.engines.deepspeed.engine import deepspeed_settings
    from megabench.engines.megatron.optimizer import _grad_scaler

    run = resolve(2, engine="deepspeed").model_copy(update={"precision": "fp16"})
    assert (
        LossScale().value == _grad_scaler().scale.item() == 2 ** deepspeed_settings(run)["fp16"]["initial_scale_power"]
    )
    assert LossScale().value <= 2**13, "at 2^16 ZeRO-1 skips steps of GPT-2 that other engines do not"


def test_users_file_wins_where_the_run_is_silent(tmp_path: Path) -> None:
    from megabench.engines.deepspeed.engine import deepspeed_settings

    content = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1234567},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": "auto",
    }
    run = resolve_with(tmp_path, content)
    assert (DeepSpeedSettings.of(run).zero_stage, run.micro_batch, run.clip_grad) == (1, 2, 1.0)
    settings = deepspeed_settings(run)
    assert settings["zero_optimization"]["reduce_bucket_size"] == 1234567
    assert settings["zero_optimization"]["overlap_comm"] is True
    assert settings["gradient_clipping"] == 1.0


def resolve_with(tmp_path: Path, content: dict[str, Any], **fields: Any) -> ResolvedConfig:
    config = write(tmp_path / "ds.json", content)
    given = {"model": "llama-tiny", "engine": "deepspeed", "deepspeed_config": config, **fields}
    return RunConfig.parse(given).resolve(2, "cpu")


@pytest.mark.parametrize(
    ("content", "fields", "words"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, {"micro_batch": 2}, ["micro_batch=8", "micro_batch=2"]),
        ({"zero_optimization": {"stage": 2}}, {"zero_stage": 3}, ["zero_stage=2", "zero_stage=3"]),
        ({"gradient_clipping": 0.1}, {"clip_grad": 1.0}, ["clip_grad=0.1", "clip_grad=1.0"]),
        ({"bf16": {"enabled": True}}, {"precision": "fp32"}, ["precision=bf16", "precision=fp32"]),
        ({"optimizer": {"type": "AdamW"}}, {}, ["sets optimizer", "--optimizer"]),
        ({"gradient_accumulation_steps": 3}, {}, ["gradient_accumulation_steps=3", "2 micro-batches"]),
        ({"bf16": {"enabled": False}}, {"precision": "bf16"}, ["bf16.enabled=False", "precision is bf16"]),
        ({"bf16": True}, {}, ["bf16 must be an object"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, ["both bf16 and fp16"]),
        ({"communication_data_type": "bf16"}, {}, ["communication_data_type=bf16", "gradients are fp32"]),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, ["sets tensor_parallel", "remove it"]),
        ({"zero_optimization": {"zero_quantized_weights": True}}, {}, ["zero_quantized_weights"]),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, {}, ["zenflow", "stale gradients"]),
        ({"zero_optimization": {"compute_grad_norm": False}}, {}, ["compute_grad_norm", "records need the norm"]),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, {}, ["bf16.bf16_optimizer_states", "in fp32"]),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, {}, ["fp16.fp16_master_weights_and_grads", "in fp32"]),
        (
            {"zero_optimization": {"stage3_module_granularity_threshold": 9}},
            {},
            ["wrong gradients", "--zero-leaf-layers"],
        ),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 9}},
            {},
            ["reduce_bucket_size=9", "largest gradient"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            {},
            ["offload_optimizer.device must be cpu", "not 'nvme'"],
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            {},
            ["offloads parameters without their optimizer"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {"offload": "all"},
            ["offload=optimizer", "offload=all"],
        ),
    ],
)
def test_contradictions_are_named(tmp_path: Path, content: dict[str, Any], fields: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_with(tmp_path, content, **fields)
    assert all(word in str(error.value) for word in words), error.value


def test_what_a_file_says_of_zero_becomes_the_runs(tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 2}
    run = resolve_with(tmp_path, {"zero_optimization": zero | {"stage3_prefetch_bucket_size": 7}})
    own = DeepSpeedSettings.of(run)
    assert (own.offload, own.hpz_size, own.zero_prefetch, own.zero_persistence) == ("all", 2, 7, None)


def test_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        RunConfig.parse(
            {"model": "llama-tiny", "engine": "deepspeed", "deepspeed_config": tmp_path / "ds.json"}
        ).resolve(2, "cpu")


def test_a_changed_file_is_another_run(tmp_path: Path) -> None:
    content: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    first = identity(resolve_with(tmp_path, content))
    assert identity(resolve_with(tmp_path, content)) == first
    content["zero_optimization"]["reduce_bucket_size"] = 1_000_000
    assert identity(resolve_with(tmp_path, content)) != first


def count_waits(run: ResolvedConfig) -> int:
    """How often DeepSpeed makes the host wait for the device in the third step; its timer lets two go."""
    from deepspeed.accelerator import get_accelerator

    from megabench.engines.deepspeed.engine import DeepSpeedEngine

    engine, source = DeepSpeedEngine(run, torch.device("cpu")), open_source(run)
    for step in range(3):
        batches = micro_batches(source, run, dist.get_rank(), step)
        with patch.object(type(get_accelerator()), "synchronize") as waits:
            engine.train_step(batches, run.lr)
    return waits.call_count


@pytest.mark.distributed
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_no_micro_batch_waits_for_the_gpu(zero_stage: int) -> None:
    run = resolve(2, engine="deepspeed", zero_stage=zero_stage, num_layers=1, global_batch=8)
    assert run.num_micro_batches == 4
    assert max(distributed.run(count_waits, 2, run)) <= (2 if zero_stage == 3 else 0)


def bf16_losses(run: ResolvedConfig) -> list[float]:
    return train(run, num_steps=4).losses


@pytest.mark.distributed
def test_zero_0_in_bf16_begins_where_others_do() -> None:
    """DeepSpeed's first step, of zero gradients, makes room for moments alone."""
    fields: dict[str, Any] = {"engine": "deepspeed", "precision": "bf16", "grad_dtype": "bf16"}
    fields |= {"optimizer": "adamw", "lr": 1e-2, "eps": 1e-8, "data": "stdlib"}
    plain, first = (
        distributed.run(bf16_losses, 2, resolve(2, zero_stage=stage, num_layers=2, **fields))[0] for stage in (0, 1)
    )
    assert plain == pytest.approx(first, rel=1e-3), "a step too many is 7e-2"


@pytest.mark.parametrize(("model", "zero_stage", "bucket"), [("llama3-8b", 2, 128256 * 4096), ("llama-tiny", 1, 5e8)])
def test_the_bucket_holds_the_largest_gradient(model: str, zero_stage: int, bucket: int) -> None:
    from megabench.engines.deepspeed.engine import deepspeed_settings

    run = resolve(2, engine="deepspeed", zero_stage=zero_stage, model=model)
    assert deepspeed_settings(run)["zero_optimization"]["reduce_bucket_size"] == bucket


def leaf_modules(run: ResolvedConfig) -> list[str]:
    from deepspeed.utils import get_z3_leaf_modules

    from megabench.engines.deepspeed.engine import DeepSpeedEngine

    engine = DeepSpeedEngine(run, torch.device("cpu"))
    return [type(module).__name__ for module in get_z3_leaf_modules(engine.engine.module)]


@pytest.mark.distributed
def test_whole_layers_are_leaves() -> None:
    run = resolve(2, engine="deepspeed", zero_leaf_layers=True)
    assert distributed.run(leaf_modules, 2, run)[0] == ["FusedLlamaDecoderLayer"] * 4


def buffer_dtypes(run: ResolvedConfig) -> set[torch.dtype]:
    from megabench.engines.deepspeed.engine import DeepSpeedEngine

    engine = DeepSpeedEngine(run, torch.device("cpu"))
    return {buffer.dtype for buffer in engine.engine.module.buffers()}


@pytest.mark.distributed
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_rotary_frequencies_stay_in_fp32(zero_stage: int) -> None:
    run = resolve(2, engine="deepspeed", zero_stage=zero_stage, precision="bf16")
    assert distributed.run(buffer_dtypes, 2, run) == [{torch.float32}] * 2
