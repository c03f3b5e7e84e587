"""The engine for TP × PP × CP × DP with megatron-core."""

from collections.abc import Mapping
from typing import Literal

from megabench.metrics import output_layer_cost
from megabench.settings.reading import ConfigError
from megabench.settings.run_settings import RunSettings
from megabench.settings.setting import EngineSettings, setting
from megabench.specs.engine_spec import EngineSpec, ResolvedRun
from megabench.specs.megatron_cost import Pipeline
from megabench.specs.megatron_memory import MegatronVariant, megatron_memory


class MegatronSettings(EngineSettings):
    stages: Literal["balanced", "even"] = setting(
        "balanced", "Engine and layout", "option", "free", label="even stages"
    )
    """Layers per pipeline stage: balanced (equal time, counting the output layer) or even (equal numbers)."""

    keep_gathered: bool = setting(False, "Engine and layout", "option", "free", label="gathered kept")
    """Keep the inputs that TP gathered for the backward pass: a fifth less TP communication, more memory."""


def chunk_layers(run: ResolvedRun) -> list[list[range]]:
    """Return the layer numbers of every model chunk of a megatron run, as [stage][chunk]."""

    is_balanced = MegatronSettings.of(run).stages == "balanced"
    cost = output_layer_cost(run.shape, run.seq_length) if is_balanced else 0.0
    return run.layout.chunk_layers(run.shape.num_layers, cost)


def _check(run: ResolvedRun) -> None:
    if MegatronSettings.of(run).keep_gathered and (run.layout.tp == 1 or run.kernels == "reference"):
        raise ConfigError(
            "keep_gathered needs megabench's tensor-parallel layers; use tp=2 or more and kernels=auto, or omit "
            "keep_gathered"
        )


def _environment(run: RunSettings) -> Mapping[str, str]:
    """Use one hardware queue under TP and CP, so that collectives start before the GEMMs that overlap them.

    Runs without TP and CP need several hardware queues.
    """
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if run.tp > 1 or run.cp > 1 else {}


SPEC = EngineSpec(
    name="megatron",
    title="megatron-core",
    summary="NVIDIA's megatron-core, with tensor, pipeline, context and data parallelism",
    implementation="megabench.engines.megatron.engine:MegatronEngine",
    cost=Pipeline,
    memory=megatron_memory,
    sharding_stage=1,
    settings=MegatronSettings,
    axes=frozenset({"tp", "pp", "vp", "cp", "dp"}),
    recompute=frozenset({"none", "selective", "full"}),
    needs_blocks=True,
    check=_check,
    environment=_environment,
    less_memory=lambda options: "a larger tp inside a host, or pp across hosts",
    variants=lambda ranks_per_host: [MegatronVariant()],
    variant_of=lambda options: MegatronVariant(),
)
