"""Declares a setting of a run once: its type, default and help, and how records and resumed runs treat it.

Loads no torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

Panel = Literal[
    "Model and data", "Engine and layout", "Batch", "Optimizer", "Precision and kernels", "Checkpoints", "Run"
]
Role = Literal["work", "layout", "option", "machine", "output", "watch"]
Resume = Literal["same", "content", "mention", "free"]


@dataclass(frozen=True)
class Setting:
    """Metadata of a setting, beside its type, default and help.

    `role` says what the setting is for:

    - "work": it must be equal for two runs to be comparable;
    - "layout": it is part of the layout, and the record has a field of its own for it;
    - "option": it changes how a step runs, and the record lists it under `options`;
    - "machine": it is a condition under which the run takes place;
    - "output": it says where the run writes files, and does not affect the result;
    - "watch": it controls monitoring, and does not affect the result.

    `resume` says what a run that resumes a checkpoint may do with the setting:

    - "same": the value must be the one that the checkpoint was trained with;
    - "content": the value may differ, but the model, the data or the engine that it names must be the same;
    - "mention": the value may change, and the log mentions the change;
    - "free": the value may change.

    `engines` lists the engines that have the setting; all have it where the list is empty. `synonyms` are names that
    other programs give it. A `searchable` setting may be "auto".
    """

    panel: Panel
    role: Role
    resume: Resume
    engines: tuple[str, ...] = ()
    synonyms: tuple[str, ...] = ()
    searchable: bool = False


def setting(
    default: Any,
    description: str,
    *,
    panel: Panel,
    role: Role,
    resume: Resume,
    engines: tuple[str, ...] = (),
    synonyms: tuple[str, ...] = (),
    searchable: bool = False,
    **bounds: Any,
) -> Any:
    """A pydantic field with its `Setting`; `bounds` (ge, le, …) go to pydantic."""
    about = Setting(panel, role, resume, engines, synonyms, searchable)
    return Field(default, description=description, json_schema_extra={"setting": about}, **bounds)  # type: ignore[dict-item]


def settings_of(model: type[BaseModel]) -> dict[str, Setting]:
    """The settings of a model by name, in the order of their declaration."""
    found: dict[str, Setting] = {}
    for name, field in model.model_fields.items():
        extra: Any = field.json_schema_extra
        assert isinstance(extra, dict) and isinstance(extra.get("setting"), Setting), (
            f"{name} is declared without setting()"
        )
        found[name] = extra["setting"]
    return found


def names(settings: dict[str, Setting], **wanted: object) -> tuple[str, ...]:
    """The names of the settings whose metadata have these values, e.g. `role="option"`."""
    return tuple(
        name for name, about in settings.items() if all(getattr(about, key) == value for key, value in wanted.items())
    )


def meant_by(word: str, settings: dict[str, Setting]) -> str | None:
    """The setting that another program calls `word`, however it is spelled (`--tensor-parallel-size`)."""
    plain = word.lstrip("-").replace("-", "_").lower()
    return next((name for name, about in settings.items() if plain in about.synonyms), None)
