"""The keys of a DeepSpeed JSON file, and what megabench does with each of them. Loads no torch.

`tests/engines/test_deepspeed_json.py` checks that the table has every key of the installed version of DeepSpeed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST_NUMBER = 10**15


@dataclass(frozen=True)
class Value:
    """A value that megabench passes to DeepSpeed. The record contains it."""

    expected: str
    is_valid: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Refused:
    """A key with which DeepSpeed would train other weights, or do what the record does not say.

    The value `harmless` and sections that are not enabled are accepted, and not passed to DeepSpeed. A key that was
    `removed` from DeepSpeed is refused with every value.
    """

    why: str
    instead: str = "remove it"
    harmless: Any = False
    removed: bool = False

    def accepts(self, value: Any) -> bool:
        if isinstance(value, dict) and self.harmless is False:
            value = value.get("enabled", any(value.values()))
        return not self.removed and (value is None or value == self.harmless)


@dataclass(frozen=True)
class Renamed:
    """Another name of a key, with a function that converts its value."""

    to: str
    convert: Callable[[Any], Any] = lambda value: value
    kind: Value | None = None


Section = Mapping[str, "Value | Refused | Renamed | Section"]


def _is_number(value: Any, least: float) -> bool:
    return type(value) in (int, float) and least <= value <= _LARGEST_NUMBER


def _count(least: int) -> Value:
    return Value(
        f"an integer from {least} to {_LARGEST_NUMBER:.0e}",
        lambda value: _is_number(value, least) and value == int(value),
        int,
    )


def _one_of(*values: Any) -> Value:
    return Value(f"one of {', '.join(map(str, values))}", lambda value: type(value) in (int, str) and value in values)


_DTYPES = {
    alias: name
    for name, others in {"fp32": ("float32", "float"), "bf16": ("bfloat16",), "fp16": ("float16", "half")}.items()
    for alias in (name, *others, f"torch.{others[0]}")
}
_FLAG = Value("true or false", lambda value: isinstance(value, bool))
_FLAG_OR_NULL = Value("true, false or null", lambda value: value is None or isinstance(value, bool))
_COUNT, _POSITIVE = _count(0), _count(1)
_ANY_COUNT = Value("an integer of at least 0", lambda value: type(value) is int and value >= 0)
_INTEGER = Value("an integer", lambda value: type(value) is int)
_COUNT_OR_NULL = Value("an integer or null", lambda value: value is None or _COUNT.is_valid(value))
_NUMBER = Value(f"a number from 0 to {_LARGEST_NUMBER:.0e}", lambda value: _is_number(value, 0))
_FACTOR = Value("a number above 0", lambda value: _is_number(value, 0) and value > 0)
_TEXT_OR_NULL = Value("a string or null", lambda value: value is None or isinstance(value, str))
_TEXTS = Value("a list of strings", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value))
_DTYPE = Value("fp32, bf16 or fp16", lambda value: isinstance(value, str) and value.lower() in _DTYPES, _DTYPES.get)
_STAGE = _one_of(0, 1, 2, 3)
_DEVICE = Value("cpu or none, because only cpu is supported", lambda value: value in ("none", "cpu"))

_NO_MASTERS = "all engines train with masters and moments in fp32"
_BUFFERS = "megabench keeps every buffer in the dtype of the model"
_RECOMPUTE = "megabench's models do not call DeepSpeed's checkpointing"
_OTHER_AXIS = "the deepspeed engine has only data parallelism"
_TRACKED = "megabench writes its own metrics"
_REMOVED = "DeepSpeed 0.19.8 has removed it"


def _removed(instead: str = "remove it") -> Refused:
    return Refused(_REMOVED, instead, removed=True)


def _on_cpu(value: Any) -> Any:
    return {"device": "cpu" if value else "none"}


_OFFLOAD: Section = {
    "device": _DEVICE,
    "pin_memory": _FLAG,
    # these keys have an effect only with NVMe, which `device` excludes
    "nvme_path": _TEXT_OR_NULL,
    "buffer_count": _COUNT,
}
_ZERO: Section = {
    "stage": _STAGE,
    "contiguous_gradients": _FLAG,
    "reduce_scatter": _FLAG,
    "reduce_bucket_size": _POSITIVE,
    "use_multi_rank_bucket_allreduce": _FLAG,
    "allgather_partitions": _FLAG,
    "allgather_bucket_size": _COUNT,
    "overlap_comm": _FLAG_OR_NULL,
    "compute_grad_norm": Refused("records need the norm of the gradients", harmless=True),
    "offload_param": {**_OFFLOAD, "buffer_size": _COUNT, "max_in_cpu": _COUNT},
    "offload_optimizer": {
        **_OFFLOAD,
        "pipeline_read": _FLAG,
        "pipeline_write": _FLAG,
        "fast_init": _FLAG,
        "ratio": Refused(
            "offload=optimizer keeps the whole optimizer state in host memory", "use 1.0, or remove it", harmless=1
        ),
        "super_offload": Refused("it replaces megabench's optimizer", "remove it and use --offload optimizer"),
        "cpuadam_cores_perc": Refused("it has an effect only with super_offload", harmless=0.8),
    },
    "cpu_offload": Renamed("offload_optimizer", _on_cpu, _FLAG_OR_NULL),
    "cpu_offload_param": Renamed("offload_param", _on_cpu, _FLAG_OR_NULL),
    "cpu_offload_use_pin_memory": Refused(
        "DeepSpeed ignores it", "use pin_memory in offload_optimizer and offload_param", harmless=None
    ),
    "zenflow": Refused("it updates weights with stale gradients"),
    "sub_group_size": _POSITIVE,
    "stage3_prefetch_bucket_size": _COUNT,
    "stage3_param_persistence_threshold": _COUNT,
    "stage3_model_persistence_threshold": _ANY_COUNT,
    "stage3_max_live_parameters": _COUNT,
    "stage3_max_reuse_distance": _COUNT,
    "stage3_gather_16bit_weights_on_model_save": _FLAG,
    "stage3_gather_fp16_weights_on_model_save": Renamed("stage3_gather_16bit_weights_on_model_save"),
    "stage3_module_granularity_threshold": Refused(
        "DeepSpeed 0.19.8 computes wrong gradients with it", "remove it and use --zero-leaf-layers", harmless=0
    ),
    "stage3_use_all_reduce_for_fetch_params": _FLAG,
    "stage3_allgather_sequential": _FLAG,
    **{
        name: Renamed(f"stage3_{name}")
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
    "leaf_module": Refused("the record would not name the modules", "remove it and use --zero-leaf-layers"),
    "zero_hpz_partition_size": _COUNT,
    "zero_quantized_weights": Refused("it changes the trained weights"),
    "zero_quantized_nontrainable_weights": Refused("it changes the trained weights"),
    "zero_quantized_gradients": Refused("it changes the gradients"),
    "ignore_unused_parameters": _FLAG,
    "round_robin_gradients": Refused("DeepSpeed 0.19.8 cannot return the gradients of single parameters with it"),
    "parameter_alignment": _FLAG,
    "memory_efficient_linear": _FLAG,
    "override_module_apply": _FLAG,
    "log_trace_cache_warnings": _FLAG,
    "enable_sanity_checks": _FLAG,
    "save_muon_momentum_buffer_in_memory": Refused("megabench does not use DeepSpeed's Muon", "remove it"),
    # DeepSpeed's own checkpoints, which megabench does not write
    "load_from_fp32_weights": _FLAG,
    "elastic_checkpoint": _FLAG,
    "pipeline_loading_checkpoint": _FLAG,
    "legacy_stage1": Refused(_REMOVED),
    "mics_shard_size": _removed("remove it; zero_hpz_partition_size also keeps a copy of the weights inside hosts"),
    "mics_hierarchical_params_gather": _removed(),
    "zeropp_loco_param": _removed(),
}
KEYS: Section = {
    "train_batch_size": _POSITIVE,
    "train_micro_batch_size_per_gpu": _POSITIVE,
    "gradient_accumulation_steps": _POSITIVE,
    "gradient_clipping": _NUMBER,
    "communication_data_type": _DTYPE,
    "zero_optimization": _ZERO,
    "bf16": {
        "enabled": _FLAG,
        "immediate_grad_update": _FLAG,
        "check_grad_overflow": Refused("every engine skips steps with non-finite gradients", harmless=True),
        "bf16_master_weights_and_grads": Refused(_NO_MASTERS),
        "bf16_optimizer_states": Refused(_NO_MASTERS),
    },
    "bfloat16": Renamed("bf16"),
    "fp16": {
        "enabled": _FLAG,
        "auto_cast": _FLAG,
        # in fp16, these six must equal the values of the other engines
        "loss_scale": _NUMBER,
        "initial_scale_power": _COUNT,
        "loss_scale_window": _COUNT,
        "hysteresis": _COUNT,
        "consecutive_hysteresis": _FLAG,
        "min_loss_scale": _NUMBER,
        "fp16_master_weights_and_grads": Refused(_NO_MASTERS),
    },
    "data_types": {
        "grad_accum_dtype": _DTYPE,
        "param_dtype": _DTYPE,
        "buffer_dtype": Refused(_BUFFERS, harmless=None),
        "keep_in_fp32_modules": Refused(_BUFFERS, harmless=None),
    },
    "comms_logger": {"enabled": _FLAG, "prof_all": _FLAG, "prof_ops": _TEXTS, "verbose": _FLAG, "debug": _FLAG},
    "flops_profiler": {
        "enabled": _FLAG,
        "recompute_fwd_factor": _NUMBER,
        "profile_step": _POSITIVE,
        "module_depth": _INTEGER,
        "top_modules": _COUNT,
        "detailed": _FLAG,
        "output_file": _TEXT_OR_NULL,
    },
    "timers": {"throughput": {"enabled": _FLAG, "synchronized": _FLAG}},
    # only NVMe uses this section
    "aio": {
        "block_size": _COUNT,
        "queue_depth": _COUNT,
        "intra_op_parallelism": _COUNT,
        "single_submit": _FLAG,
        "overlap_events": _FLAG,
        "use_gds": Refused("only cpu is supported for offloading"),
    },
    "steps_per_print": _COUNT_OR_NULL,
    "wall_clock_breakdown": _FLAG,
    "memory_breakdown": _FLAG,
    "dump_state": _FLAG,
    "vocabulary_size": _COUNT_OR_NULL,
    "prescale_gradients": _FLAG,
    "gradient_predivide_factor": _FACTOR,
    "zero_allow_untested_optimizer": Refused("megabench's optimizers need true", harmless=True),
    "zero_force_ds_cpu_optimizer": Refused("megabench selects the optimizer of offloaded state"),
    "optimizer": Refused(
        "megabench sets it for every engine",
        "remove it and use --optimizer, --lr, --betas, --eps and --weight-decay",
    ),
    "scheduler": Refused(
        "megabench sets it for every engine",
        "remove it and use --lr, --schedule, --lr-warmup and --min-lr",
    ),
    "activation_checkpointing": {
        "partition_activations": Refused(_RECOMPUTE, "remove it and use --recompute full"),
        "number_checkpoints": Refused(_RECOMPUTE, "remove it and use --recompute full", harmless=None),
        "contiguous_memory_optimization": Refused(_RECOMPUTE, "remove it and use --recompute full"),
        "synchronize_checkpoint_boundary": Refused(_RECOMPUTE),
        "profile": Refused(_RECOMPUTE),
        "cpu_checkpointing": Refused(_RECOMPUTE, "remove it and use --recompute full"),
    },
    "torch_autocast": Refused("megabench casts the weights of every engine", "remove it and use --precision bf16"),
    "managed_gradient_accumulation": Refused("megabench relies on DeepSpeed's accumulation", harmless=True),
    "gradient_allreduce_op": Refused("every engine averages gradients", "use mean, or remove it", harmless="mean"),
    "disable_allgather": Refused("DeepSpeed 0.19.8 ignores it"),
    "allgather_size": Refused(
        "DeepSpeed 0.19.8 ignores it", "use zero_optimization.allgather_bucket_size", harmless=None
    ),
    "disable_python_gc": Refused("garbage collection must be the same under every engine"),
    "log_level": Refused("megabench sets DeepSpeed's log level", harmless=None),
    "dataloader_drop_last": Refused("megabench reads the data", "remove it"),
    "checkpoint": Refused("megabench writes its own checkpoints", "remove it and use --save and --load"),
    "datastates_ckpt": Refused("megabench writes its own checkpoints", "remove it and use --save-mode async"),
    "tensorboard": Refused(_TRACKED, "remove it and use --tensorboard DIR"),
    "wandb": Refused(_TRACKED, "remove it and write a callback for --callbacks"),
    "comet": Refused(_TRACKED, "remove it and write a callback for --callbacks"),
    "csv_monitor": Refused(_TRACKED, "remove it and use --out DIR"),
    "autotuning": Refused("megabench finds settings itself", "remove it and use micro_batch=auto or megabench compare"),
    "compile": Refused("megabench does not compile DeepSpeed's models", "remove it, or use --engine fsdp --compile"),
    "pipeline": Refused(_OTHER_AXIS, "remove it, or use --engine megatron --pp N"),
    "tensor_parallel": Refused(_OTHER_AXIS, "remove it, or use --engine megatron --tp N"),
    "sequence_parallel_size": Refused(_OTHER_AXIS, "remove it, or use --engine megatron --cp N", harmless=1),
    "seq_parallel_communication_data_type": Refused(_OTHER_AXIS, harmless=None),
    "expert_parallel": Refused(_OTHER_AXIS),
    "use_data_before_expert_parallelism": Refused(_OTHER_AXIS),
    "data_efficiency": Refused("it changes the data", "remove it and use --data"),
    "hybrid_engine": Refused("megabench does not generate text"),
    "weight_quantization": Refused("it changes the trained weights"),
    **{
        name: _removed()
        for name in (
            "nebula",
            "compression_training",
            "quantize_training",
            "sparse_gradients",
            "eigenvalue",
            "sparse_attention",
            "elasticity",
            "graph_harvesting",
            "curriculum_learning",
            "progressive_layer_drop",
        )
    },
    "amp": _removed("remove it and use --precision bf16"),
}
