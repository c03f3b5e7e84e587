"""torch's FSDP2, fully or hybrid sharded."""

from collections.abc import Iterator, Mapping
from typing import Any

from megabench.settings.reading import ConfigError
from megabench.settings.run import RunSettings
from megabench.specs.base import EngineSpec, Variant, more_offload
from megabench.specs.data_parallel_cost import DataParallel


def _check(run: RunSettings) -> None:
    if run.offload == "optimizer":
        raise ConfigError("fsdp offloads its shards and their optimizer together; use offload=all")


def _variants(ranks_per_host: int | None) -> Iterator[Variant]:
    yield Variant(3)
    yield Variant(3, keeps_weights=True)
    yield Variant(3, "all")
    if ranks_per_host:
        yield Variant(3, shard_size=ranks_per_host)


def _less_memory(options: Mapping[str, Any]) -> str:
    return "a larger shard_size" if options.get("shard_size") else more_offload(options)


SPEC = EngineSpec(
    name="fsdp",
    title="FSDP2",
    summary="FSDP2, PyTorch's own way to share out a model",
    implementation="megabench.engines.fsdp.engine:FsdpEngine",
    cost=DataParallel,
    sharding_stage=3,
    wants_queues=True,
    less_memory=_less_memory,
    check=_check,
    variants=_variants,
)
