"""Every key of a DeepSpeed JSON: passed on and recorded, read as another key, or refused by name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.specs import deepspeed_keys
from megabench.specs.deepspeed_json import read_deepspeed_json
from megabench.specs.deepspeed_keys import KEYS, Refused, Renamed, Section, Value
from tests import distributed
from tests.engines.equivalence import resolve, train


def write(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return path


def run_with(folder: Path, content: dict[str, Any], **fields: Any) -> ResolvedConfig:
    given = {"model": "llama-tiny", "engine": "deepspeed", "deepspeed_config": write(folder, content), **fields}
    return RunConfig.parse(given).resolve(2, "cpu")


def paths(section: Section, prefix: str = "") -> Iterator[tuple[str, Value | Refused | Renamed]]:
    for key, rule in section.items():
        if isinstance(rule, Value | Refused | Renamed):
            yield prefix + key, rule
        else:
            yield from paths(rule, f"{prefix}{key}.")


RULES = dict(paths(KEYS))
EXAMPLES: dict[Value, Any] = {
    deepspeed_keys._FLAG: True,
    deepspeed_keys._FLAG_OR_NULL: True,
    deepspeed_keys._COUNT: 3,
    deepspeed_keys._COUNT_OR_NULL: 3,
    deepspeed_keys._POSITIVE: 3,
    deepspeed_keys._ANY_COUNT: 2**63 - 1,
    deepspeed_keys._INTEGER: -1,
    deepspeed_keys._NUMBER: 0.5,
    deepspeed_keys._FACTOR: 0.5,
    deepspeed_keys._TEXT_OR_NULL: "text",
    deepspeed_keys._TEXTS: ["text"],
    deepspeed_keys._DTYPE: "fp32",
    deepspeed_keys._DEVICE: "cpu",
    deepspeed_keys._STAGE: 2,
}


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


class Asked(dict[str, Any]):
    """A dictionary that remembers the keys for which a program asked."""

    def __init__(self, **content: Any) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:  # DeepSpeed asks `key in content.keys()`
        return self


def keys_of_the_installed_deepspeed() -> set[str]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.config import (
        _REMOVED_TOP_LEVEL_CONFIG_KEYS,
        _REMOVED_ZERO_CONFIG_KEYS,
        DeepSpeedConfig,
    )
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models: dict[str, Any] = {
        "bf16.": DeepSpeedBF16Config,
        "fp16.": DeepSpeedFP16Config,
        "comms_logger.": CommsLoggerConfig,
        "timers.throughput.": DeepSpeedThroughputTimerConfig,
        "zero_optimization.": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer.": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param.": DeepSpeedZeroOffloadParamConfig,
    }
    keys = {
        prefix + key
        for prefix, model in models.items()
        for name, field in model.model_fields.items()
        for key in (name, field.alias or name)
    }
    read = {name: Asked() for name in ("activation_checkpointing", "aio", "data_types", "flops_profiler", "timers")}
    content = Asked(train_micro_batch_size_per_gpu=1, **read)
    DeepSpeedConfig(content)
    sections = {prefix.split(".")[0] for prefix in models} | {*read}
    keys |= {*content.asked, *_REMOVED_TOP_LEVEL_CONFIG_KEYS} - sections
    keys |= {f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS}
    keys |= {f"{name}.{key}" for name, section in read.items() for key in section.asked}
    return keys - {"zero_optimization.offload_optimizer", "zero_optimization.offload_param", "timers.throughput"}


# Keys that DeepSpeed asks for in other places than DeepSpeedConfig, or only in the presence of another key.
ASKED_ELSEWHERE = {"allgather_size", "sequence_parallel_size", "vocabulary_size", "weight_quantization"}


def test_the_table_has_every_key_of_the_installed_deepspeed() -> None:
    """A new version of DeepSpeed with another key fails here until `deepspeed_keys.KEYS` decides about the key."""
    assert keys_of_the_installed_deepspeed() | ASKED_ELSEWHERE == RULES.keys() | ASKED_ELSEWHERE


# Constants of deepspeed/runtime/constants.py that are no keys, or keys of sections that megabench refuses.
NO_KEYS = {"train", "eval", "predict", "encode", "mean", "sum", "ddp_bf16", "ds_pipe_replicated"}
NO_KEYS |= {"data_parallel_group", "global_rank"}
IN_REFUSED_SECTIONS = {
    "optimizer": {"type", "params", "legacy_fusion", "max_grad_norm"},
    "torch_autocast": {"enabled", "dtype", "lower_precision_safe_modules"},
    "checkpoint": {"tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "pipeline_stage"},
}


def test_the_table_has_every_constant_of_the_installed_deepspeed() -> None:
    from deepspeed.runtime import constants

    names = {
        value
        for name, value in vars(constants).items()
        if isinstance(value, str) and name.isupper() and not name.endswith(("_DEFAULT", "_FORMAT"))
    }
    known = {part for path in RULES for part in path.split(".")} | NO_KEYS
    # the second is a key of bf16 in no model
    assert names - known - set().union(*IN_REFUSED_SECTIONS.values()) - {"check_overflow"} == set()


def of(kind: type) -> list[str]:
    return [path for path, rule in RULES.items() if isinstance(rule, kind)]


@pytest.mark.parametrize("path", of(Value))
def test_a_value_is_checked_and_recorded(path: str, tmp_path: Path) -> None:
    content = nested(path, EXAMPLES[RULES[path]])  # type: ignore[index]
    assert read_deepspeed_json(write(tmp_path, content)) == content
    with pytest.raises(ConfigError, match=rf"ds\.json: {re.escape(path)} must be "):
        read_deepspeed_json(write(tmp_path, nested(path, {"an": "object"})))


@pytest.mark.parametrize("path", of(Refused))
def test_a_refused_key_is_named(path: str, tmp_path: Path) -> None:
    rule = RULES[path]
    assert isinstance(rule, Refused)
    with pytest.raises(ConfigError, match=rf"ds\.json sets {re.escape(path)}, but .+; (remove|use) "):
        read_deepspeed_json(write(tmp_path, nested(path, {"enabled": True})))
    *sections, key = path.split(".")
    harmless = nested(path, rule.harmless)
    if rule.removed:
        with pytest.raises(ConfigError, match=key):
            read_deepspeed_json(write(tmp_path, harmless))
    else:
        assert read_deepspeed_json(write(tmp_path, harmless)) == (nested(".".join(sections), {}) if sections else {})


@pytest.mark.parametrize("path", of(Renamed))
def test_another_name_of_a_key_is_read_as_the_key(path: str, tmp_path: Path) -> None:
    rule = RULES[path]
    assert isinstance(rule, Renamed)
    *sections, key = path.split(".")
    target = ".".join([*sections, rule.to])
    kind = rule.kind or RULES.get(target)
    value = EXAMPLES[kind] if isinstance(kind, Value) else {} if kind is None else 7

    def answer(content: dict[str, Any]) -> str:
        try:
            return str(read_deepspeed_json(write(tmp_path, content)))
        except ConfigError as error:
            return str(error)

    assert answer(nested(path, value)).replace(path, target) == answer(nested(target, rule.convert(value)))
    both = {key: value, rule.to: rule.convert(value)}
    assert f"sets {path} and {target}" in answer(nested(".".join(sections), both) if sections else both)


@pytest.mark.parametrize("path", RULES)
def test_auto_leaves_the_value_to_megabench(path: str, tmp_path: Path) -> None:
    *sections, _ = path.split(".")
    assert read_deepspeed_json(write(tmp_path, nested(path, "auto"))) == (
        nested(".".join(sections), {}) if sections else {}
    )


USERS_PRECISION: dict[str, Any] = {"fp16": {"enabled": False}, "bf16": {"enabled": True}}
USERS_OFFLOAD: dict[str, Any] = {
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
}
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cpu_offload": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"zero_stage": 2, "offload": "optimizer"},
    ),
    "cpu_offload_param": (
        {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}},
        {"zero_stage": 3, "offload": "all"},
    ),
    "no_cpu_offload": ({"zero_optimization": {"stage": 1, "cpu_offload": False}}, {"zero_stage": 1, "offload": "none"}),
    "names_of_fields": (
        {"zero_optimization": {"prefetch_bucket_size": 7, "param_persistence_threshold": 8.0}},
        {"zero_stage": 3, "zero_prefetch": 7, "zero_persistence": 8},
    ),
    "keys_of_stage_3": (
        {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 7}},
        {"zero_stage": 2, "zero_prefetch": None},
    ),
    "bfloat16": ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}),
    "dtypes": (
        {"communication_data_type": "FP32", "data_types": {"grad_accum_dtype": "torch.float32"}},
        {"grad_dtype": "fp32"},
    ),
    "boilerplate_that_is_off": (
        {
            "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
            "wandb": {"enabled": False},
            "compile": {"deepcompile": False},
            "activation_checkpointing": {"cpu_checkpointing": False, "number_checkpoints": None},
            "gradient_allreduce_op": "mean",
        },
        {"zero_stage": 3, "recompute": "none"},
    ),
    # two files with which users train Llama-3-8B
    "users_a": (
        {
            **USERS_PRECISION,
            "zero_optimization": {
                "stage": 3,
                **USERS_OFFLOAD,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": False,
            },
            "gradient_clipping": "auto",
            "steps_per_print": 10,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "wall_clock_breakdown": False,
        },
        {"zero_stage": 3, "offload": "all", "precision": "bf16", "zero_prefetch": None},
    ),
    "users_b": (
        {
            **USERS_PRECISION,
            "zero_optimization": {
                "stage": 3,
                **USERS_OFFLOAD,
                "sub_group_size": 1e8,
                "reduce_bucket_size": 5e7,
                "stage3_prefetch_bucket_size": 5e7,
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e8,
                "stage3_max_reuse_distance": 1e8,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "train_batch_size": "auto",
        },
        {"zero_stage": 3, "offload": "all", "precision": "bf16", "zero_prefetch": 50_000_000},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_record_says_what_the_file_says(name: str, tmp_path: Path) -> None:
    content, expected = FILES[name]
    run = run_with(tmp_path, content)
    assert {key: getattr(run, key, getattr(run.own, key, None)) for key in expected} == expected
    recorded = run.spec.recorded(run.options)["deepspeed_config"]
    assert recorded == read_deepspeed_json(write(tmp_path, content)), "under the names of the keys themselves"


@pytest.mark.parametrize(
    ("content", "fields", "sentence"),
    [
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
            {},
            "sets zero_optimization.mics_shard_size, but DeepSpeed 0.19.8 has removed it; remove it",
        ),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, {}, "optimizer.super_offload, but it"),
        ({"communication_data_type": "fp16"}, {}, "communication_data_type=fp16, but gradients are fp32; remove it"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, {}, "ds.json sets data_types.grad_accum_dtype=fp16, but no"),
        ({"data_types": {"grad_accum_dtype": "fp64"}}, {}, "ds.json: data_types.grad_accum_dtype must be fp32, bf16"),
        ({"data_types": {"param_dtype": "bf16"}}, {}, "data_types.param_dtype=bf16, but the run's precision is fp32"),
        (
            {"prescale_gradients": True},
            {},
            "prescale_gradients=True, which DeepSpeed supports only with zero_stage 0 and",
        ),
        ({"gradient_predivide_factor": 2}, {"zero_stage": 2}, "with zero_stage 0 and 1, not 2; remove it"),
        ({"overlap_com": True}, {}, "sets overlap_com, which is no key of DeepSpeed; "),
        ({"train_batchsize": 8}, {}, "which is no key of DeepSpeed; did you mean train_batch_size or "),
        (
            {"zero_optimization": {"overlap_com": True}},
            {},
            "sets zero_optimization.overlap_com, which is no key of DeepSpeed; did you mean overlap_comm?",
        ),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, {}, "use --recompute full"),
        (
            {"zero_optimization": {"offload_optimizer": None}},
            {"offload": "optimizer"},
            "sets offload=none, but",
        ),
        ({"zero_optimization": {"offload_param": {}}}, {"offload": "all"}, "sets offload=optimizer, but the run"),
        (
            {"zero_optimization": {"stage3_max_reuse_distance": 5}},
            {"reshard_after_forward": False},
            "zero_optimization.stage3_max_reuse_distance, but so does reshard_after_forward=false",
        ),
    ],
)
def test_what_contradicts_is_named(tmp_path: Path, content: dict[str, Any], fields: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_with(tmp_path, content, **fields)
    assert sentence in str(error.value)


def test_fp16_scales_the_loss_as_under_every_engine(tmp_path: Path) -> None:
    path = write(tmp_path, {"fp16": {"enabled": True, "initial_scale_power": 16}})
    run = RunConfig.parse({"model": "llama-tiny", "engine": "deepspeed", "deepspeed_config": path})
    with pytest.raises(ConfigError, match=r"fp16\.initial_scale_power=16, but it is 13 under every engine; use 13"):
        run.resolve(2, "cuda")
    write(tmp_path, {"fp16": {"enabled": "auto", "initial_scale_power": 16}})
    assert run.resolve(2, "cuda").precision == "bf16"


PASSED_ON: dict[str, dict[str, Any]] = {
    "zero_optimization": {
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "use_multi_rank_bucket_allreduce": False,
        "allgather_partitions": False,
        "allgather_bucket_size": 1000,
        "overlap_comm": False,
        "sub_group_size": 100_000,
        "stage3_model_persistence_threshold": 10_000,
        "stage3_max_live_parameters": 1000,
        "stage3_max_reuse_distance": 1000,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_use_all_reduce_for_fetch_params": True,
        "parameter_alignment": True,
        "memory_efficient_linear": False,
        "override_module_apply": False,
        "ignore_unused_parameters": False,
        "enable_sanity_checks": True,
        "log_trace_cache_warnings": True,
        "load_from_fp32_weights": False,
        "elastic_checkpoint": True,
        "pipeline_loading_checkpoint": True,
    },
    "more": {
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "steps_per_print": 1,
        "vocabulary_size": 255,
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"], "prof_all": False},
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "timers": {"throughput": {"enabled": True}},
        "aio": {"block_size": 4096},
        "bf16": {"immediate_grad_update": True},
        "fp16": {"auto_cast": True},
    },
}


def losses_of(run: ResolvedConfig) -> list[float]:
    return train(run, num_steps=3).losses


@pytest.mark.distributed
@pytest.mark.parametrize("name", PASSED_ON)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_what_is_passed_on_leaves_the_losses_equal(zero_stage: int, name: str, tmp_path: Path) -> None:
    section = PASSED_ON[name]
    content = {name: section} if name == "zero_optimization" else section
    if zero_stage < 2:
        content = content | {"prescale_gradients": True, "gradient_predivide_factor": 2}
    path = write(tmp_path, content)
    plain = resolve(2, engine="deepspeed", zero_stage=zero_stage, num_layers=2)
    with_file = resolve(2, engine="deepspeed", zero_stage=zero_stage, num_layers=2, deepspeed_config=path)
    assert distributed.run(losses_of, 2, with_file)[0] == pytest.approx(
        distributed.run(losses_of, 2, plain)[0], rel=1e-5
    )
