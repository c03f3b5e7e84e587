"""Remove secrets from the text of a study file. Loads no torch."""

import re

import yaml

from megabench.runtime.environment import is_secret

MASKED = "***"
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")  # the anchor and the tag before a value


def without_secrets(text: str) -> str:
    """Return valid YAML text with the secrets under each `env` replaced by MASKED, and everything else unchanged."""
    spans: dict[int, int] = {}
    _find(yaml.compose(text, yaml.SafeLoader), False, spans, set())
    for start, stop in sorted(spans.items(), reverse=True):
        value = text[start:stop]
        before, line_end = _PROPERTIES.match(value), "\n" if value.endswith("\n") else ""
        text = f'{text[:start]}{before[0] if before else ""}"{MASKED}"{line_end}{text[stop:]}'
    return text


def _find(node: yaml.Node | None, is_env: bool, spans: dict[int, int], seen: set[tuple[int, bool]]) -> None:
    """Add the start and the end of each secret below `node` to `spans`."""
    if (id(node), is_env) in seen:
        return
    seen.add((id(node), is_env))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _find(child, is_env, spans, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if is_env and isinstance(value, yaml.ScalarNode) and is_secret(key.value, value.value):
                spans[value.start_mark.index] = value.end_mark.index
            _find(value, is_env or key.value == "env", spans, seen)
