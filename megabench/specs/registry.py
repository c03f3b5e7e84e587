"""Registry of all engines and programs by name. Add one line here for a new engine or program."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from megabench.specs.ddp import Ddp
from megabench.specs.deepspeed import DeepSpeed
from megabench.specs.engine_spec import EngineSpec
from megabench.specs.fsdp import Fsdp
from megabench.specs.hf_trainer import HfTrainer
from megabench.specs.megatron import Megatron
from megabench.specs.megatron_fsdp import MegatronFsdp
from megabench.specs.torchtitan import Torchtitan

_SPECS: tuple[EngineSpec, ...] = (
    Megatron(),
    DeepSpeed(),
    Fsdp(),
    MegatronFsdp(),
    Ddp(),
)
ENGINES: dict[str, EngineSpec] = {spec.name: spec for spec in _SPECS}
# Training programs that people run. A study compares them with the engines.
PROGRAMS: dict[str, EngineSpec] = {spec.name: spec for spec in (HfTrainer(), Torchtitan())}
ENGINES_AND_PROGRAMS = ENGINES | PROGRAMS


def is_zero3(engine: str, options: Mapping[str, Any]) -> bool:
    """Return whether these options select DeepSpeed's ZeRO-3. The result is False for an unknown engine."""
    spec = ENGINES.get(engine)
    return isinstance(spec, DeepSpeed) and spec.stage_of(options) == 3


def implementation_of(name: str) -> Any:
    """Import and return the class of an engine or a program."""
    module, _, attribute = ENGINES_AND_PROGRAMS[name].implementation.partition(":")
    return getattr(import_module(module), attribute)
