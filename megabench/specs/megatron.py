"""TP × PP × CP × DP on megatron-core."""

from collections.abc import Mapping

from megabench.settings.reading import ConfigError
from megabench.settings.run import RunSettings
from megabench.specs.base import EngineSpec
from megabench.specs.megatron_cost import Pipeline


def _check(run: RunSettings) -> None:
    if run.keep_gathered and (run.tp == 1 or run.kernels == "reference"):
        raise ConfigError(
            "keep_gathered keeps what megabench's tensor-parallel layers gather: it needs tp=2 or more and "
            "kernels=auto; leave it out otherwise"
        )


def _environment(run: RunSettings) -> Mapping[str, str]:
    """One hardware queue keeps TP and CP collectives in step with the GEMMs they overlap; others want many."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if run.tp > 1 or run.cp > 1 else {}


SPEC = EngineSpec(
    name="megatron",
    title="megatron-core",
    summary="megatron-core, NVIDIA's library for models that are cut over many GPUs",
    implementation="megabench.engines.megatron.engine:MegatronEngine",
    cost=Pipeline,
    sharding_stage=1,
    axes=frozenset({"tp", "pp", "vp", "cp", "dp"}),
    recompute=frozenset({"none", "selective", "full"}),
    needs_blocks=True,
    less_memory=lambda options: "a larger tp inside a host, or pp across hosts",
    check=_check,
    environment=_environment,
)
