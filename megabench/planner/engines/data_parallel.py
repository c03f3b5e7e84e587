"""What the planner knows of the data-parallel engines: DeepSpeed ZeRO, FSDP2, Megatron-FSDP and DDP. Loads no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megabench.cost.job import Candidate, Job
from megabench.cost.memory import Memory
from megabench.cost.profile import Profile
from megabench.cost.shared_costs import Base
from megabench.parallel.layout import Layout
from megabench.planner.engines.data_parallel_cost import DataParallel
from megabench.planner.engines.data_parallel_memory import data_parallel_memory, host_bytes
from megabench.planner.engines.planned_engine import PlannedEngine
from megabench.planner.engines.sharding import Sharding
from megabench.specs.engine_spec import Options
from megabench.specs.registry import ENGINES


class _PlannedDataParallel(PlannedEngine):
    def variant_of(self, options: Options) -> Sharding:
        return Sharding.of(self.spec.stage_of(options), options)

    def settings_of(self, variant: Sharding) -> Mapping[str, Any]:
        return variant.settings

    def cost_model(self, base: Base) -> DataParallel:
        return DataParallel(base)

    def memory(self, job: Job, candidate: Candidate, profile: Profile) -> Memory:
        return data_parallel_memory(job, candidate, profile)

    def host_bytes(self, job: Job, candidate: Candidate, ranks_per_server: int) -> float:
        return host_bytes(job, candidate, ranks_per_server)


class PlannedDeepSpeed(_PlannedDataParallel):
    spec = ENGINES["deepspeed"]

    def variants(self, job: Job, ranks_per_host: int | None, layout: Layout) -> Iterator[Sharding]:
        # ZeRO-0 accumulates gradients only in the dtype of the values (specs/deepspeed.py)
        if job.bytes_of_gradient == job.bytes_of_value:
            yield Sharding(0)
        for offload in ("none", "optimizer"):
            for stage in (1, 2, 3):
                yield Sharding(stage, offload)
        yield Sharding(3, keeps_weights=True)
        yield Sharding(3, "all")
        if ranks_per_host:
            yield Sharding(3, hpz_size=ranks_per_host)

    def settings_of(self, variant: Sharding) -> Mapping[str, Any]:
        settings = {**variant.settings, "zero_stage": variant.zero_stage}
        # The cost model assumes that ZeRO-3 gathers whole layers, so that the host does not wait for parts of a layer.
        return settings | ({"zero_leaf_layers": True} if variant.zero_stage == 3 else {})


class PlannedFsdp(_PlannedDataParallel):
    spec = ENGINES["fsdp"]

    def variants(self, job: Job, ranks_per_host: int | None, layout: Layout) -> Iterator[Sharding]:
        yield Sharding(3)
        yield Sharding(3, keeps_weights=True)
        yield Sharding(3, "all")
        if ranks_per_host:
            yield Sharding(3, shard_size=ranks_per_host)


class PlannedMegatronFsdp(_PlannedDataParallel):
    spec = ENGINES["megatron_fsdp"]
    is_measured = False

    def variants(self, job: Job, ranks_per_host: int | None, layout: Layout) -> Iterator[Sharding]:
        yield Sharding(3)
        if ranks_per_host:
            yield Sharding(3, shard_size=ranks_per_host, shards_across=True)

    def variant_of(self, options: Options) -> Sharding:
        return replace(super().variant_of(options), shards_across=bool(options.get("shard_size")))


class PlannedDdp(_PlannedDataParallel):
    spec = ENGINES["ddp"]

    def variants(self, job: Job, ranks_per_host: int | None, layout: Layout) -> Iterator[Sharding]:
        yield Sharding(0)
