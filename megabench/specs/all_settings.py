"""All settings by name: the settings of all engines, and the settings that only some engines have. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from megabench.settings.run_settings import RunSettings
from megabench.settings.setting import Setting, fields_of, metadata
from megabench.specs.registry import ENGINES_AND_PROGRAMS


@dataclass(frozen=True)
class _Declared:
    """A setting and the engines that have it. `engines` is empty if all engines have it."""

    field: FieldInfo
    engines: tuple[str, ...] = ()


def _all_declared() -> dict[str, _Declared]:
    """Return the settings of all engines. In each panel, engine-specific settings follow the common ones."""
    common = {name: _Declared(field) for name, field in fields_of(RunSettings).items()}
    own: dict[str, _Declared] = {}
    for spec in ENGINES_AND_PROGRAMS.values():
        for name, field in fields_of(spec.settings).items():
            assert name not in common, f"{spec.name} declares {name}, which all engines have"
            declared = own.get(name, _Declared(field))
            assert metadata(name, field) == metadata(name, declared.field), f"{name} is declared in two ways"
            own[name] = _Declared(field, (*declared.engines, spec.name))
    end_of_panel = {metadata(name, item.field).panel: place for place, (name, item) in enumerate(common.items())}
    places = {name: place for place, name in enumerate(common)}
    places |= {name: end_of_panel[metadata(name, item.field).panel] for name, item in own.items()}
    everything = common | own
    return {name: everything[name] for name in sorted(everything, key=places.__getitem__)}


_DECLARED = _all_declared()
FIELDS: dict[str, FieldInfo] = {name: declared.field for name, declared in _DECLARED.items()}
SETTINGS: dict[str, Setting] = {name: metadata(name, field) for name, field in FIELDS.items()}


def engines_with(name: str) -> tuple[str, ...]:
    """Return the engines that have this setting, or an empty tuple if all have it."""
    return _DECLARED[name].engines


def is_default(name: str, value: object) -> bool:
    return bool(value == FIELDS[name].default)


def labels(options: Mapping[str, Any]) -> list[str]:
    """Return the labels of recorded options for the engine's name in reports: "offload all", "hpz 4"."""
    return [
        about.label.format(options[name])
        for name, about in SETTINGS.items()
        if about.label and name in options and not is_default(name, options[name])
    ]
