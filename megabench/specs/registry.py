"""Registry of all engines by name. Add one line here for a new engine."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from megabench.specs import ddp, deepspeed, fsdp, megatron, megatron_fsdp
from megabench.specs.engine_spec import EngineSpec

ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        megatron.SPEC,
        deepspeed.SPEC,
        fsdp.SPEC,
        megatron_fsdp.SPEC,
        ddp.SPEC,
    )
}


def is_zero3(engine: str, options: Mapping[str, Any]) -> bool:
    """Return whether these options select ZeRO-3. The result is False for an unknown engine."""
    return engine in ENGINES and ENGINES[engine].is_zero3(options)


def implementation_of(name: str) -> Any:
    """Import and return the class of an engine."""
    module, _, attribute = ENGINES[name].implementation.partition(":")
    return getattr(import_module(module), attribute)
