"""DeepSpeed ZeRO, stages 0 to 3."""

from collections.abc import Iterator, Mapping
from typing import Any

from megabench.settings.reading import ConfigError
from megabench.settings.run import RunSettings
from megabench.specs.base import EngineSpec, Variant, more_offload
from megabench.specs.data_parallel_cost import DataParallel

_OF_STAGE_3 = ("hpz_size", "zero_prefetch", "zero_persistence", "zero_leaf_layers", "reshard_after_forward")


def _stage(run: RunSettings) -> int:
    return 3 if run.zero_stage is None else run.zero_stage


def _check(run: RunSettings) -> None:
    stage = _stage(run)
    for name in _OF_STAGE_3:
        if getattr(run, name) != RunSettings.model_fields[name].default and stage != 3:
            raise ConfigError(f"{name}={getattr(run, name)} is a setting of zero_stage=3, not {stage}; leave it out")
    if run.offload != "none" and (stage == 0 or (run.offload == "all" and stage != 3)):
        raise ConfigError(
            f"offload={run.offload} needs {'zero_stage=3' if run.offload == 'all' else 'zero_stage 1 to 3'}, and "
            f"zero_stage={stage}; use it with that, or offload=none"
        )


def _complete(run: RunSettings) -> Mapping[str, Any]:
    return {"zero_stage": _stage(run)}


def _mode(run: RunSettings) -> str:
    return f"zero_stage={_stage(run)}"


def _variants(ranks_per_host: int | None) -> Iterator[Variant]:
    for offload in ("none", "optimizer"):
        for stage in (1, 2, 3):
            yield Variant(stage, offload)
    yield Variant(3, keeps_weights=True)
    yield Variant(3, "all")
    if ranks_per_host:
        yield Variant(3, hpz_size=ranks_per_host)


def _less_memory(options: Mapping[str, Any]) -> str:
    stage = options.get("zero_stage")
    return "zero_stage: 3" if stage is not None and stage < 3 else more_offload(options)


SPEC = EngineSpec(
    name="deepspeed",
    title="DeepSpeed ZeRO",
    summary="DeepSpeed, which keeps each layer whole and shares out what must be kept of it",
    implementation="megabench.engines.deepspeed.engine:DeepSpeedEngine",
    cost=DataParallel,
    sharding_stage=3,
    wants_queues=True,
    less_memory=_less_memory,
    check=_check,
    complete=_complete,
    holds_matrices=lambda run: _stage(run) == 0,
    mode=_mode,
    variants=_variants,
)
