"""What the planner knows of an engine. Loads no torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from megabench.cost.job import Candidate, Job, Variant
from megabench.cost.memory import Memory
from megabench.cost.profile import Profile
from megabench.cost.shared_costs import Base
from megabench.parallel.layout import Layout
from megabench.specs.engine_spec import EngineSpec, Options


class CostModel(Protocol):
    """Predicts the step time of an engine's candidates."""

    def parts(self, candidate: Candidate) -> dict[str, float]:
        """Return the seconds of each part of a step. The sum of all parts is the step time."""
        ...

    def shortest(self, candidate: Candidate) -> float:
        """Return a lower bound of the step time in seconds that is quick to compute."""
        ...


class PlannedEngine(ABC):
    """The variants of an engine that the planner predicts, with their time and memory.

    With `adds_gradients`, the engine's matrix products can add weight gradients to their buffers. `is_measured` is
    False if this project has no measured run of the engine on several GPUs.
    """

    spec: EngineSpec
    adds_gradients: bool = False
    is_measured: bool = True

    @abstractmethod
    def variants(self, job: Job, ranks_per_host: int | None, layout: Layout) -> Iterable[Variant]:
        """Yield the variants to predict for a job and a layout. `ranks_per_host` is None if the run uses one host."""

    @abstractmethod
    def variant_of(self, options: Options) -> Variant:
        """Return the variant of a run with these settings, or of a record with these options."""

    @abstractmethod
    def settings_of(self, variant: Any) -> Mapping[str, Any]:
        """Return the non-default settings of a run that trains the variant."""

    @abstractmethod
    def cost_model(self, base: Base) -> CostModel:
        """Return the model of the step time."""

    @abstractmethod
    def memory(self, job: Job, candidate: Candidate, profile: Profile) -> Memory:
        """Return the bytes by part of the rank that uses the most memory."""

    def host_bytes(self, job: Job, candidate: Candidate, ranks_per_server: int) -> float:
        """Return the bytes of host memory that offload uses on each server."""
        return 0.0
