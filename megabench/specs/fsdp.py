"""The engine for torch's FSDP2, fully or hybrid sharded."""

from collections.abc import Iterator
from typing import Literal

from megabench.parallel.layout import Layout
from megabench.settings.bounds import NumRanks
from megabench.settings.reading import ConfigError
from megabench.settings.setting import EngineSettings
from megabench.specs.data_parallel_cost import DataParallel
from megabench.specs.data_parallel_memory import data_parallel_memory, host_bytes
from megabench.specs.engine_spec import EngineSpec, Options, ResolvedRun, check_divides, more_offload
from megabench.specs.sharding import Sharding
from megabench.specs.shared_settings import COMPILE, OFFLOAD, RESHARD_AFTER_FORWARD, SHARD_SIZE


class FsdpSettings(EngineSettings):
    offload: Literal["none", "optimizer", "all"] = OFFLOAD
    shard_size: NumRanks | None = SHARD_SIZE
    reshard_after_forward: bool = RESHARD_AFTER_FORWARD
    compile: bool = COMPILE


def _check(run: ResolvedRun) -> None:
    own = FsdpSettings.of(run)
    check_divides("shard_size", own.shard_size, run.world_size)
    if own.offload == "optimizer":
        raise ConfigError("fsdp can offload weights only together with the optimizer state; use offload=all")


def _variants(ranks_per_host: int | None, layout: Layout) -> Iterator[Sharding]:
    yield Sharding(3)
    yield Sharding(3, keeps_weights=True)
    yield Sharding(3, "all")
    if ranks_per_host:
        yield Sharding(3, shard_size=ranks_per_host)


def _less_memory(options: Options) -> str:
    return "a larger shard_size" if options.get("shard_size") else more_offload(options)


SPEC = EngineSpec(
    name="fsdp",
    title="FSDP2",
    summary="PyTorch's FSDP2, which shards weights, gradients and optimizer state over data-parallel ranks",
    implementation="megabench.engines.fsdp.engine:FsdpEngine",
    cost=DataParallel,
    memory=data_parallel_memory,
    host_bytes=host_bytes,
    sharding_stage=3,
    settings=FsdpSettings,
    wants_queues=True,
    check=_check,
    uses_host=lambda options: options.get("offload", "none") != "none",
    less_memory=_less_memory,
    variants=_variants,
    variant_of=Sharding.of,
    variant_settings=lambda sharding: sharding.settings,
)
