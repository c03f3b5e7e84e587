"""What the planner knows of the megatron engine. Loads no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from megabench.cost.job import Candidate, Job
from megabench.cost.memory import Memory
from megabench.cost.profile import Profile
from megabench.cost.shared_costs import Base
from megabench.parallel.layout import Layout
from megabench.planner.engines.megatron_cost import Pipeline
from megabench.planner.engines.megatron_memory import MegatronVariant, megatron_memory
from megabench.planner.engines.planned_engine import PlannedEngine
from megabench.specs.engine_spec import Options
from megabench.specs.registry import ENGINES


class PlannedMegatron(PlannedEngine):
    spec = ENGINES["megatron"]
    adds_gradients = True

    def variants(self, job: Job, ranks_per_host: int | None, layout: Layout) -> Iterator[MegatronVariant]:
        yield MegatronVariant()
        per_stage = layout.world_size // layout.pp
        if not ranks_per_host or per_stage == ranks_per_host:
            return
        if per_stage % ranks_per_host == 0 and ranks_per_host % layout.tp == 0:
            yield MegatronVariant(shard_size=ranks_per_host)

    def variant_of(self, options: Options) -> MegatronVariant:
        return MegatronVariant(shard_size=options.get("shard_size"))

    def settings_of(self, variant: MegatronVariant) -> Mapping[str, Any]:
        return {"shard_size": variant.shard_size} if variant.shard_size else {}

    def cost_model(self, base: Base) -> Pipeline:
        return Pipeline(base)

    def memory(self, job: Job, candidate: Candidate, profile: Profile) -> Memory:
        return megatron_memory(job, candidate, profile)
