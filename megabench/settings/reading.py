"""Read settings from files, and turn invalid settings into one error message."""

import errno
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megabench import inputs
from megabench.errors import UserError, near_names


class ConfigError(UserError):
    """Raised for a setting that is invalid or contradicts another setting."""


_MOST_VALUES = 100_000  # maximum number of values in a YAML file after its aliases are expanded


def read_text(path: Path) -> str:
    """Return the text of a settings file. Raises ConfigError if the file cannot be read or exceeds 1 MiB."""
    try:
        return inputs.read_text(path)
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.EINVAL):
            raise ConfigError(f"{path} is {error.strerror}; use a regular file of at most 1 MiB") from None
        raise ConfigError(f"cannot read {path}: {error.strerror}; use the path of a readable file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is {error}; use a YAML or JSON text file") from None


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that rejects what plain YAML silently misreads.

    Plain YAML uses the last of duplicate keys, and reads 010 as the octal number 8. A few lines of nested YAML aliases
    can expand to billions of values.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                self._refuse(key, f"{key.value} occurs twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        digits = node.value.lstrip("+-")
        if len(digits) > 1 and digits[0] == "0" and digits[1].isdigit():
            self._refuse(node, f"{node.value} is octal in YAML; write the decimal number without leading zeros")
        return super().construct_yaml_int(node)

    def load(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > _MOST_VALUES:
            self._refuse(node, f"the file has more than {_MOST_VALUES:,} values after its aliases are expanded")
        return self.construct_document(node)

    def _refuse(self, node: yaml.Node, problem: str) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values of `node` after its aliases are expanded.

    `known` maps the ids of nodes to the numbers that were already computed.
    """
    if id(node) not in known:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = [child for part in parts for child in (part if isinstance(part, tuple) else (part,))]
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


def parse_yaml(text: str) -> Any:
    """Return the value of YAML text. Raises ValueError or yaml.YAMLError if the text is not valid."""
    try:
        content = _StrictLoader(text).load()
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None
    inputs.check_depth(content)
    return content


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError if the file is unreadable or contains no mapping."""
    try:
        content = parse_yaml(read_text(path))
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a mapping of settings, e.g. 'tp: 2', not {type(content).__name__}")
    return content


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConfigError if the file is unreadable or contains no object."""
    content = read_json(path, partial(_each_once, path=path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a JSON object, not {type(content).__name__}")
    return content


def read_json(path: Path, of_pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON file, whose objects `of_pairs` makes. Raises ConfigError if it is unreadable."""
    text = read_text(path)
    try:
        return inputs.parse_json(text, of_pairs)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}; correct the file") from None


def _each_once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{path}: {key!r} occurs twice in one object; remove one of them")
    return dict(pairs)


def near_matches(word: str, known: list[str], otherwise: str | None = None) -> str:
    """Return "did you mean X?" for similar names.

    If none is similar, return `otherwise`, or a list of all known names.
    """
    if near := near_names(word, known):
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(known)}" if otherwise is None else otherwise


def _near_names_only(word: str, known: list[str], value: object) -> str:
    return near_matches(word, known)


def _no_better_value(name: str, value: object) -> None:
    return None


_CHOICE_PROBLEMS = ("literal_error", "choice", "boolean", "string_type")
Hint = Callable[[str, list[str], object], str]
BetterValue = Callable[[str, object], str | None]


def literal_values(annotation: Any) -> tuple[Any, ...]:
    """Return the choices of a Literal, or of the Literal in `Literal[…] | None`, and () for any other type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    arms = [arm for arm in get_args(annotation) if arm is not NoneType]
    return get_args(arms[0]) if len(arms) == 1 and get_origin(arms[0]) is Literal else ()


def explain(
    error: ValidationError,
    fields: Mapping[str, FieldInfo],
    hint: Hint = _near_names_only,
    better_value: BetterValue = _no_better_value,
) -> str:
    """Return the first problem of a ValidationError as one error message with a remedy.

    `fields` are the fields of the model. `hint` returns a suggestion for an unknown name with its value, and
    `better_value` one for a value that is none of the choices of a setting, or None.
    """
    problem = error.errors()[0]
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name!r}; {hint(name, list(fields), problem['input'])}"
    if problem["type"] == "sentence":
        return problem["msg"]
    field = fields.get(name)
    if problem["type"] in _CHOICE_PROBLEMS and (better := better_value(name, problem["input"])):
        return f"{name}={problem['input']!r} is not known; {better}"
    if problem["type"] == "literal_error" and field:
        choices = ", ".join(map(str, literal_values(field.annotation)))
        return f"{name}={problem['input']!r} is not known; use one of {choices}"
    if problem["type"] == "choice":
        return f"{name}={problem['input']!r} {problem['msg']}"
    return f"{name}={problem['input']!r} is not valid: {problem['msg'][0].lower()}{problem['msg'][1:]}"
