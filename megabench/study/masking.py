"""Remove secrets from the text of a study file and from JSON values. Loads no torch."""

import re
from typing import Any

import yaml

from megabench.runtime.environment import is_secret, secrets_in_text

MASKED = "***"
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")  # the anchor and the tag before a value


def without_secrets(text: str) -> str:
    """Return valid YAML text with its secrets replaced by MASKED, and everything else unchanged.

    Secrets are the secret variables under each `env`, and every value that contains an access token or the value of a
    secret variable of this process. In comments and keys, only the token is replaced.
    """
    spans: dict[int, int] = {}
    pattern = secrets_in_text()
    _find(yaml.compose(text, yaml.SafeLoader), False, pattern, spans, set())
    for start, stop in sorted(spans.items(), reverse=True):
        value = text[start:stop]
        before, line_end = _PROPERTIES.match(value), "\n" if value.endswith("\n") else ""
        text = f'{text[:start]}{before[0] if before else ""}"{MASKED}"{line_end}{text[stop:]}'
    return pattern.sub(MASKED, text)


def without_secrets_in(value: Any) -> Any:
    """Return a JSON value without secrets.

    Access tokens and the values of this process's secret variables are replaced by MASKED in all strings. Each object
    `variables` loses its secret environment variables.
    """
    return _masked(value, secrets_in_text())


def _masked(value: Any, pattern: re.Pattern[str]) -> Any:
    match value:
        case str():
            return pattern.sub(MASKED, value)
        case list():
            return [_masked(item, pattern) for item in value]
        case dict():
            return {name: _masked(_kept(name, item), pattern) for name, item in value.items()}
        case _:
            return value


def _kept(name: str, value: Any) -> Any:
    if name != "variables" or not isinstance(value, dict):
        return value
    return {variable: content for variable, content in value.items() if not is_secret(variable, str(content))}


def _find(
    node: yaml.Node | None, is_env: bool, pattern: re.Pattern[str], spans: dict[int, int], seen: set[tuple[int, bool]]
) -> None:
    """Add the start and the end of each secret below `node` to `spans`."""
    if (id(node), is_env) in seen:
        return
    seen.add((id(node), is_env))
    if isinstance(node, yaml.ScalarNode) and pattern.search(node.value):
        spans[node.start_mark.index] = node.end_mark.index
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _find(child, is_env, pattern, spans, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if is_env and isinstance(value, yaml.ScalarNode) and is_secret(key.value, value.value):
                spans[value.start_mark.index] = value.end_mark.index
            _find(value, is_env or key.value == "env", pattern, spans, seen)
