"""Expand the entries of a study file into trials with names. Lists of values become one trial per value."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from megabench.config import ResolvedConfig
from megabench.parallel.layout import GIVEN_SIZES
from megabench.settings.network_limit import NetworkLimit
from megabench.specs.registry import PROGRAMS

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")

_IN_THE_LAYOUT = {"engine", "zero_stage", *GIVEN_SIZES}

# a trial name contains only the values of these settings, because the values are clear without the setting's name
_FILES = {"deepspeed_config", "trainer_args"}
_VALUE_ALONE = {"engine", "model", "optimizer", "precision", *_FILES}
# what a name has before the number of a setting
_BEFORE_NUMBER = {
    **{name: name for name in (*GIVEN_SIZES, "lr", "seed", "steps")},
    "micro_batch": "mb",
    "global_batch": "gbs",
    "seq_length": "seq",
    "num_layers": "layers",
    "zero_stage": "zero",
    "shard_size": "shard",
    "hpz_size": "hpz",
    "emulate_hosts": "hosts",
    "emulate_network": "network",
    "world_size": "ranks",
}


def list_fields(entry: Mapping[str, Any]) -> list[str]:
    """Return the fields of `entry` whose value is a list of alternatives.

    The value of `betas` is a list of two numbers.
    """
    return [
        field
        for field, value in entry.items()
        if isinstance(value, list) and (field != "betas" or any(isinstance(item, list) for item in value))
    ]


def num_combinations(entry: Mapping[str, Any]) -> int:
    """Return the number of trials to which `entry` expands."""
    return prod(len(entry[field]) for field in list_fields(entry))


def expand(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one mapping for each combination of the list values in `entry`. The last list varies fastest."""
    fields = list_fields(entry)
    return [
        {**entry, **dict(zip(fields, values, strict=True))} for values in product(*(entry[field] for field in fields))
    ]


def automatic_name(config: ResolvedConfig, shown: Mapping[str, Any]) -> str:
    """Return a name from the layout, such as "tp2-pp2" or "zero3", and from the other fields in `shown`."""
    mode = config.spec.mode(config.options)
    stem = mode.lower().replace("-", "") if mode else str(config.layout).replace("·", "-")
    if config.engine in PROGRAMS:
        stem = f"{config.engine.replace('_', '-')}-{stem}"
    return with_fields(stem, {field: value for field, value in shown.items() if field not in _IN_THE_LAYOUT})


def short_form(field: str, word: str) -> str:
    """Return a setting as people write it: "mb4", "fp16", "no-compile", "recompute-full"."""
    name = field.replace("_", "-")
    if field in _VALUE_ALONE:
        return word
    if word in ("True", "False"):
        return name if word == "True" else f"no-{name}"
    if field in _BEFORE_NUMBER and word[:1].isdigit():
        return f"{_BEFORE_NUMBER[field]}{word}"
    return f"{_BEFORE_NUMBER.get(field, name)}-{word}"


def full_form(field: str, word: str) -> str:
    """Return a setting with its whole name, for a trial whose short form another trial has: "micro_batch4"."""
    return f"{field}{word}" if word[:1].isdigit() else f"{field}_{word}"


def with_fields(stem: str, fields: Mapping[str, Any], form: Callable[[str, str], str] = short_form) -> str:
    """Append fields and values to `stem`, valid in a path: ("tp2", {"micro_batch": 4}) → "tp2-mb4".

    A form that `stem` already contains is not repeated, and a number is appended to a stem that ends with the word
    before the number: ("zero", {"zero_stage": 1}) → "zero1".
    """
    parts = []
    for field, value in fields.items():
        part = form(field, re.sub(r"[^A-Za-z0-9._+=-]+", "_", _word(field, value)).strip("_"))
        last = stem.rpartition("-")[2]
        if last.isalpha() and part.startswith(last) and part[len(last) :][:1].isdigit():
            stem += part[len(last) :]
        elif f"-{part}-" not in f"-{stem}-":
            parts.append(part)
    return "-".join([stem, *parts])


def _word(field: str, value: Any) -> str:
    """Return the value of a field as it appears in a name."""
    if field == "emulate_network":
        return "unlimited" if value is None else NetworkLimit.model_validate(value).short
    return Path(value).stem if field in _FILES else str(value)


def numbered(names: Iterable[str]) -> list[str]:
    """Return the names, with a number added to repeated names: a, a, b → a, a-2, b."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique
