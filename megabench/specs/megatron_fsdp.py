"""The engine for NVIDIA's Megatron-FSDP: ZeRO-3 inside groups of ranks, ZeRO-1 across them."""

from collections.abc import Iterator
from dataclasses import replace

from megabench.parallel.layout import Layout
from megabench.settings.bounds import NumRanks
from megabench.settings.setting import EngineSettings
from megabench.specs.data_parallel_cost import DataParallel
from megabench.specs.data_parallel_memory import data_parallel_memory
from megabench.specs.engine_spec import EngineSpec, ResolvedRun, check_divides
from megabench.specs.sharding import Sharding
from megabench.specs.shared_settings import SHARD_SIZE


class MegatronFsdpSettings(EngineSettings):
    shard_size: NumRanks | None = SHARD_SIZE


def _check(run: ResolvedRun) -> None:
    check_divides("shard_size", MegatronFsdpSettings.of(run).shard_size, run.world_size)


def _variants(ranks_per_host: int | None, layout: Layout) -> Iterator[Sharding]:
    yield Sharding(3)
    if ranks_per_host:
        yield Sharding(3, shard_size=ranks_per_host, shards_across=True)


SPEC = EngineSpec(
    name="megatron_fsdp",
    title="Megatron-FSDP",
    summary="NVIDIA's Megatron-FSDP: ZeRO-3 inside groups of ranks, and ZeRO-1 across groups",
    implementation="megabench.engines.megatron_fsdp.engine:MegatronFsdpEngine",
    cost=DataParallel,
    memory=data_parallel_memory,
    sharding_stage=3,
    settings=MegatronFsdpSettings,
    wants_queues=True,
    check=_check,
    less_memory=lambda options: "a larger shard_size" if options.get("shard_size") else "more GPUs",
    variants=_variants,
    variant_of=lambda options: replace(Sharding.of(options), shards_across=bool(options.get("shard_size"))),
    variant_settings=lambda sharding: sharding.settings,
)
