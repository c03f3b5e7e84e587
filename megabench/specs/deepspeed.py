"""The engine for DeepSpeed ZeRO, stages 0 to 3."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from megabench.models.mapping import largest_parameter
from megabench.models.shape import ModelShape
from megabench.optim.optimizers import OPTIMIZERS
from megabench.settings.bounds import NumElements, NumRanks
from megabench.settings.reading import ConfigError
from megabench.settings.run_settings import RunSettings
from megabench.settings.setting import EngineSettings, setting
from megabench.specs.deepspeed_json import check_deepspeed_json, names_batch, read_deepspeed_json, settings_of_run
from megabench.specs.engine_spec import EngineSpec, Options, ResolvedRun, check_divides, more_offload
from megabench.specs.fp8_check import check_keep_transposed
from megabench.specs.shared_settings import DEEPSPEED_CONFIG, KEEP_TRANSPOSED, OFFLOAD, RESHARD_AFTER_FORWARD

REDUCE_BUCKET = 500_000_000  # DeepSpeed's default, in elements
_DEFAULT_STAGE = 3
_OF_STAGE_3 = ("hpz_size", "zero_prefetch", "zero_persistence", "zero_leaf_layers", "reshard_after_forward")


class DeepSpeedSettings(EngineSettings):
    zero_stage: Literal[0, 1, 2, 3] | None = setting(None, "Engine and layout", "option", "free")
    """ZeRO stage of the deepspeed engine [default: 3]."""

    offload: Literal["none", "optimizer", "all"] = OFFLOAD
    hpz_size: NumRanks | None = setting(
        None, "Engine and layout", "option", "free", synonyms="zero_hpz_partition_size", label="hpz {}"
    )
    """Neighbouring ranks that share a second copy of ZeRO-3's shards for the backward pass (ZeRO++ hpZ)."""

    zero_prefetch: NumElements | None = setting(
        None, "Engine and layout", "option", "free", synonyms="stage3_prefetch_bucket_size"
    )
    """Number of elements that ZeRO-3 gathers in advance [default: DeepSpeed's]."""

    zero_persistence: NumElements | None = setting(
        None, "Engine and layout", "option", "free", synonyms="stage3_param_persistence_threshold"
    )
    """ZeRO-3 keeps parameters up to this number of elements whole on every rank [default: DeepSpeed's]."""

    zero_leaf_layers: bool = setting(False, "Engine and layout", "option", "free", label="whole layers")
    """Make ZeRO-3 gather and release whole layers (DeepSpeed's leaf modules) instead of single modules."""

    reshard_after_forward: bool = RESHARD_AFTER_FORWARD
    keep_transposed: bool = KEEP_TRANSPOSED
    deepspeed_config: Path | None = DEEPSPEED_CONFIG

    @property
    def stage(self) -> int:
        """The ZeRO stage, or the default one."""
        return _DEFAULT_STAGE if self.zero_stage is None else self.zero_stage


class DeepSpeed(EngineSpec):
    name = "deepspeed"
    title = "DeepSpeed ZeRO"
    summary = "DeepSpeed ZeRO, which shards optimizer state, gradients and weights over data-parallel ranks"
    implementation = "megabench.engines.deepspeed.engine:DeepSpeedEngine"
    sharding_stage = _DEFAULT_STAGE
    settings = DeepSpeedSettings
    wants_queues = True

    def read_file(self, run: RunSettings, given: Mapping[str, Any]) -> Mapping[str, Any]:
        path = DeepSpeedSettings.of(run).deepspeed_config
        return settings_of_run(read_deepspeed_json(path), dict(given), path) if path else {}

    def complete(self, run: RunSettings) -> Mapping[str, Any]:
        return {"zero_stage": DeepSpeedSettings.of(run).stage}

    def check(self, run: ResolvedRun) -> None:
        own = DeepSpeedSettings.of(run)
        stage = own.stage
        check_divides("hpz_size", own.hpz_size, run.world_size)
        for name in _OF_STAGE_3:
            if getattr(own, name) != DeepSpeedSettings.model_fields[name].default and stage != 3:
                raise ConfigError(f"{name}={getattr(own, name)} works only with zero_stage=3, not {stage}; omit {name}")
        if own.offload != "none" and (stage == 0 or (own.offload == "all" and stage != 3)):
            raise ConfigError(
                f"offload={own.offload} needs {'zero_stage=3' if own.offload == 'all' else 'zero_stage 1 to 3'}, but "
                f"zero_stage={stage}; change zero_stage, or use offload=none"
            )
        if stage == 0 and (dtype := run.policy.compute) != run.grad_dtype:
            raise ConfigError(
                f"DeepSpeed's zero_stage=0 accumulates {dtype} gradients only in {dtype}, but "
                f"grad_dtype={run.grad_dtype}; use zero_stage=1, or precision=fp32"
            )
        check_keep_transposed(run, own.keep_transposed, keeps_casts=stage < 3)
        if own.deepspeed_config:
            content = read_deepspeed_json(own.deepspeed_config)
            check_deepspeed_json(content, run, stage, not own.reshard_after_forward, own.deepspeed_config)

    def why_not_saved(self, run: ResolvedRun) -> str | None:
        if DeepSpeedSettings.of(run).stage != 0:
            return None
        optimizer = OPTIMIZERS[run.optimizer]
        if optimizer.needs_matrices:
            return (
                f"checkpoints of zero_stage=0 do not contain {optimizer.title}'s state; use --engine ddp or "
                f"optimizer=adamw, or train without --save"
            )
        if run.policy.has_masters:
            return (
                f"checkpoints of zero_stage=0 need the fp32 master weights, which DeepSpeed hides in {run.precision}; "
                f"use zero_stage=1, or precision=fp32"
            )
        return None

    def mode(self, options: Options) -> str:
        return f"ZeRO-{self.stage_of(options)}"

    def holds_matrices(self, options: Options) -> bool:
        return self.stage_of(options) == 0

    def fixes_batch(self, options: Options) -> bool:
        content = _content(options)
        return content is not None and names_batch(content)

    def recorded(self, options: Options) -> Mapping[str, Any]:
        return {"deepspeed_config": _content(options)}

    def less_memory(self, options: Options) -> str:
        return "zero_stage: 3" if self.stage_of(options) < 3 else more_offload(options)


def _content(options: Options) -> dict[str, Any] | None:
    """Return the content of the user's DeepSpeed JSON file, from its path (in settings) or its content (in records)."""
    given = options.get("deepspeed_config")
    return read_deepspeed_json(Path(given)) if isinstance(given, str | Path) else given


@cache
def reduce_bucket(shape: ModelShape) -> int:
    """Return the bucket size of ZeRO-1 and 2 in elements. The bucket is at least as large as the largest gradient.

    DeepSpeed 0.19.8 frees a gradient larger than its bucket while a slow link still reads it.
    """
    return max(REDUCE_BUCKET, largest_parameter(shape))
