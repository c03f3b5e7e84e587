"""Collecting the test cases of all engines."""

import sys
from types import ModuleType

import pytest

from tests.engines import cases as package
from tests.engines.cases import cases


def add_engine(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> None:
    """Registers an engine called "toy" whose file of cases is `module`, or missing."""
    monkeypatch.setattr(package, "ENGINES", [*package.ENGINES, "toy"])
    if module:
        monkeypatch.setitem(sys.modules, f"{package.__name__}.toy", module)


def test_an_engine_without_a_file_of_cases_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    add_engine(monkeypatch, None)
    with pytest.raises(LookupError, match=r"The toy engine has no test cases\. Write tests/engines/cases/toy\.py"):
        cases("OPTIONS")


def test_the_cases_of_a_new_engine_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cases("OPTIONS")
    module = ModuleType("toy")
    module.OPTIONS = {"toy-fast": (2, {})}  # type: ignore[attr-defined]
    module.RESUMED = [{"engine": "toy"}]  # type: ignore[attr-defined]
    add_engine(monkeypatch, module)
    assert [*cases("OPTIONS")] == [*before, "toy-fast"]
    assert cases("RESUMED")["toy-0"] == {"engine": "toy"}
    assert "toy" not in str(cases("ADAFACTOR")), "an engine leaves out what it has no cases of"


def test_a_name_that_two_engines_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = next(iter(cases("OPTIONS")))
    module = ModuleType("toy")
    module.OPTIONS = {taken: (2, {})}  # type: ignore[attr-defined]
    add_engine(monkeypatch, module)
    with pytest.raises(ValueError, match=rf"repeats the names .*{taken}.* Rename them in tests/engines/cases/toy\.py"):
        cases("OPTIONS")
