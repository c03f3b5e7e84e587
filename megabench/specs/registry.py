"""All engines by name. A new engine needs one more line here."""

from importlib import import_module
from typing import Any

from megabench.specs import ddp, deepspeed, fsdp, megatron
from megabench.specs.base import EngineSpec

ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        megatron.SPEC,
        deepspeed.SPEC,
        fsdp.SPEC,
        ddp.SPEC,
    )
}


def implementation_of(name: str) -> Any:
    """The class of an engine, imported now."""
    module, _, attribute = ENGINES[name].implementation.partition(":")
    return getattr(import_module(module), attribute)
