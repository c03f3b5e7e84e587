"""Expand the entries of a study file into trials with names. Lists of values become one trial per value."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from typing import Any

from megabench.config import ResolvedConfig

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")

_IN_THE_LAYOUT = {"engine", "zero_stage", "tp", "cp", "pp", "vp"}


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
    return with_fields(stem, {field: value for field, value in shown.items() if field not in _IN_THE_LAYOUT})


def with_fields(stem: str, fields: Mapping[str, Any]) -> str:
    """Append fields and values to `stem`, valid in a path: ("tp2", {"micro_batch": 4}) → "tp2-micro_batch4"."""
    parts = [stem]
    for field, value in fields.items():
        word = re.sub(r"[^A-Za-z0-9._+=-]+", "_", str(value)).strip("_")
        parts.append(f"{field}{word}" if word[:1].isdigit() else f"{field}_{word}")
    return "-".join(parts)


def numbered(names: Iterable[str]) -> list[str]:
    """Return the names, with a number added to repeated names: a, a, b → a, a-2, b."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique
