"""Representatives of large matrices of tests: `make test` runs them, and `make test-exhaustive` all the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def with_representatives(names: Iterable[str], *representatives: str) -> list[Any]:
    """The names as parameters. All but the representatives are marked as exhaustive."""
    names = list(names)
    assert {*representatives} <= {*names}, f"{ {*representatives} - {*names} } are no cases"
    return [name if name in representatives else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]
