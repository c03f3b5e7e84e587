"""The declaration of a setting: type, default, help, and its treatment in records and resumed runs.

Loads no torch.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

Panel = Literal[
    "Model and data", "Engine and layout", "Batch", "Optimizer", "Precision and kernels", "Checkpoints", "Run"
]
Role = Literal["work", "size", "layout", "option", "machine", "output", "watch"]
Resume = Literal["same", "content", "mention", "free"]


@dataclass(frozen=True)
class Setting:
    """Metadata of a setting, in addition to its type, default and help.

    `role` says what the setting is for:

    - "work": it must be equal for two runs to be comparable;
    - "size": it is the size of a parallel axis, a field of `Layout`;
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

    `synonyms` are names of the setting in other programs. A `searchable` setting may be "auto". Reports append `label`
    to the engine's name if the setting differs from its default; `{}` in the label is replaced by the value.
    """

    panel: Panel
    role: Role
    resume: Resume
    synonyms: tuple[str, ...] = ()
    searchable: bool = False
    label: str | None = None


class Settings(BaseModel):
    """Base class of settings, which are declared with `setting`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans for numeric settings, because pydantic would convert YAML's true and yes to 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise PydanticCustomError("boolean", "expected a number or a string, got a boolean")
        return value


class EngineSettings(Settings):
    """Base class of the settings that only some engines have.

    An engine with additional settings declares a subclass.
    """

    @classmethod
    def of(cls, run: "HasEngineSettings") -> Self:
        """Return the settings of the run's engine, which must be of this class."""
        assert isinstance(run.own, cls), f"the run has {type(run.own).__name__}, not {cls.__name__}"
        return run.own


class HasEngineSettings(Protocol):
    """A configuration before or after it is resolved."""

    @property
    def own(self) -> EngineSettings: ...


def setting(
    default: Any,
    panel: Panel,
    role: Role,
    resume: Resume,
    *,
    synonyms: str = "",
    description: str | None = None,
    searchable: bool = False,
    label: str | None = None,
    **bounds: Any,
) -> Any:
    """Declare a field of `Settings`. The docstring below the field is its description, which `--help` shows.

    `synonyms` are separated by spaces. `bounds` (ge, le, …) are passed to pydantic. A setting that several classes
    share has no docstring of its own and is given a `description`.
    """
    about = Setting(panel, role, resume, tuple(synonyms.split()), searchable, label)
    return Field(default, description=description, json_schema_extra={"setting": about}, **bounds)  # type: ignore[dict-item]


def fields_of(model: type[Settings]) -> dict[str, FieldInfo]:
    """Return the fields of `model` that are settings, by name, in the order of declaration."""
    return {name: field for name, field in model.model_fields.items() if field.annotation is not EngineSettings}


def metadata(name: str, field: FieldInfo) -> Setting:
    """Return the metadata of the setting `name`, which must be declared with `setting`."""
    extra: Any = field.json_schema_extra
    about = extra.get("setting") if isinstance(extra, dict) else None
    assert isinstance(about, Setting), f"{name} is declared without setting()"
    return about


def names(settings: dict[str, Setting], **wanted: object) -> tuple[str, ...]:
    """Return the names of the settings whose metadata has these values, e.g. `role="option"`."""
    return tuple(
        name for name, about in settings.items() if all(getattr(about, key) == value for key, value in wanted.items())
    )


def meant_by(word: str, settings: dict[str, Setting]) -> str | None:
    """Return the setting that other programs call `word`, spelled as a flag or a field (`--tensor-parallel-size`)."""
    plain = word.lstrip("-").replace("-", "_").lower()
    return next((name for name, about in settings.items() if plain in about.synonyms), None)
