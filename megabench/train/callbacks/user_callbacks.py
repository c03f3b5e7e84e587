"""Imports the callbacks that a user names."""

import re
import sys
from importlib import import_module
from typing import Any

import yaml

from megabench.config import ConfigError
from megabench.errors import one_line
from megabench.settings.reading import parse_yaml
from megabench.train.callbacks.callback import Callback

# one of several callbacks separated by commas: module:Class, or module:Class(name=value, name=value)
_CALLBACK = re.compile(r"\s*(?P<module>[\w.]+):(?P<kind>\w+)(\((?P<arguments>[^()]*)\))?\s*(,|$)")
_ARGUMENT = re.compile(r"""\s*(?P<name>\w+)\s*=\s*(?P<value>"[^"]*"|'[^']*'|[^,"']+)\s*(,|$)""")


def load_callbacks(names: str, found: list[Callback]) -> None:
    """Create an instance of each class in `names` ("module:Class,module:Class(every=10)"), and append it to `found`.

    Arguments are YAML scalars. Raises ConfigError if a class cannot be imported or created. No instance is created
    before all classes are imported.
    """
    if not names:
        return
    if "" not in sys.path:
        sys.path.append("")  # search the working directory last, because a file in it may have the name of a library
    kinds: dict[str, tuple[type[Callback], dict[str, Any], str]] = {}
    for matched in _split(_CALLBACK, names, f"callbacks={names!r}: use module:Class or module:Class(name=value)"):
        module, kind, arguments = matched["module"], matched["kind"], matched["arguments"] or ""
        name = f"{module}:{kind}"
        if kind in kinds:
            raise ConfigError(f"callbacks={names} contains two classes named {kind}; rename one of them")
        kinds[kind] = _import(module, kind, name), _parse(arguments, name), name
    for created in kinds.values():
        found.append(_create(*created))


def _split(pattern: re.Pattern[str], text: str, problem: str) -> list[re.Match[str]]:
    """Return the consecutive matches of `pattern`, which must cover all of `text`."""
    matches: list[re.Match[str]] = []
    position = 0
    while position < len(text) or not matches:
        if not (matched := pattern.match(text, position)):
            raise ConfigError(f"{problem}, e.g. my_callbacks:LossSpikes(factor=1.5)")
        matches.append(matched)
        position = matched.end()
    return matches


def _parse(arguments: str, name: str) -> dict[str, Any]:
    if not arguments.strip():
        return {}
    problem = f"callbacks={name}({arguments}): use arguments as name=value"
    return {matched["name"]: _scalar(matched["value"], problem) for matched in _split(_ARGUMENT, arguments, problem)}


def _scalar(text: str, problem: str) -> Any:
    """Return the value of a YAML scalar."""
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ValueError):
        value = {}
    if isinstance(value, dict | list):
        raise ConfigError(f"{problem}, and put {text.strip()} in quotes")
    return value


def _import(module: str, kind: str, name: str) -> type[Callback]:
    try:
        found = getattr(import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"callbacks={name}: {error}; use a class from a module in the working directory or on PYTHONPATH"
        ) from None
    except (Exception, SystemExit) as error:  # sys.exit(0) would end the run with status 0
        raise ConfigError(f"callbacks={name} cannot be imported: {one_line(error)}; correct the module") from None
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise ConfigError(
            f"callbacks={name} is not a subclass of megabench.train.callbacks.Callback; derive it from Callback"
        )
    return found


def _create(kind: type[Callback], arguments: dict[str, Any], name: str) -> Callback:
    try:
        return kind(**arguments)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"callbacks={name} cannot be created: {one_line(error)}; correct its arguments") from None
