"""Registry of the engines that the planner can predict, by name. Other engines train, but are missing from plans."""

from megabench.planner.engines.data_parallel import PlannedDdp, PlannedDeepSpeed, PlannedFsdp, PlannedMegatronFsdp
from megabench.planner.engines.megatron import PlannedMegatron
from megabench.planner.engines.planned_engine import PlannedEngine
from megabench.specs.registry import ENGINES

_PLANNED: tuple[PlannedEngine, ...] = (
    PlannedMegatron(),
    PlannedDeepSpeed(),
    PlannedFsdp(),
    PlannedMegatronFsdp(),
    PlannedDdp(),
)
PLANNED_ENGINES: dict[str, PlannedEngine] = {engine.spec.name: engine for engine in _PLANNED}


def unplanned_engines() -> list[str]:
    """Return the names of the engines that the planner cannot predict."""
    return [name for name in ENGINES if name not in PLANNED_ENGINES]
