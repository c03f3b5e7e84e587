"""Read settings from files, and turn invalid settings into one error message."""

from collections.abc import Callable, Hashable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megabench import UserError


class ConfigError(UserError):
    """A setting that is wrong or contradicts another."""


def read_text(path: Path) -> str:
    """Return the text of a settings file. Raises ConfigError if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; use the path of a readable file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; use a YAML or JSON text file") from None


class _EachOnce(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys, of which plain YAML uses the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError if the file is unreadable or contains no mapping."""
    try:
        content = yaml.load(read_text(path), _EachOnce)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a mapping of settings, e.g. 'tp: 2', not {type(content).__name__}")
    return content


def near_matches(word: str, known: list[str], otherwise: str | None = None) -> str:
    """Return "did you mean X?" for similar names.

    If none is similar, return `otherwise`, or a list of all known names.
    """
    near = get_close_matches(word, known, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return otherwise or f"known: {', '.join(known)}"


Hint = Callable[[str, list[str]], str]


def literal_values(annotation: Any) -> tuple[Any, ...]:
    """Return the choices of a Literal, or of the Literal in `Literal[…] | None`, and () for any other type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    arms = [arm for arm in get_args(annotation) if arm is not NoneType]
    return get_args(arms[0]) if len(arms) == 1 and get_origin(arms[0]) is Literal else ()


def explain(error: ValidationError, fields: Mapping[str, FieldInfo], hint: Hint = near_matches) -> str:
    """Return the first problem of a ValidationError as one error message with a remedy.

    `fields` are the fields of the model; `hint` returns a suggestion for an unknown name.
    """
    problem = error.errors()[0]
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name!r}; {hint(name, list(fields))}"
    if problem["type"] == "sentence":
        return problem["msg"]
    field = fields.get(name)
    if problem["type"] == "literal_error" and field:
        choices = ", ".join(map(str, literal_values(field.annotation)))
        return f"{name}={problem['input']!r} is not known; use one of {choices}"
    if problem["type"] == "choice":
        return f"{name}={problem['input']!r} {problem['msg']}"
    return f"{name}={problem['input']!r} is not valid: {problem['msg'][0].lower()}{problem['msg'][1:]}"
