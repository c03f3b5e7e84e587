"""Every engine of the registry, at its defaults, does the work of one process, and goes on from its checkpoint."""

from pathlib import Path

import pytest

from megabench.planner.engines.registry import PLANNED_ENGINES
from megabench.planner.search import candidates
from megabench.specs.registry import ENGINES
from tests.engines.equivalence import OPTIMIZERS, assert_equal_to_reference
from tests.engines.test_resume import SMALL, TOLERANCE, difference, save_at_six
from tests.planner.jobs import hosts, job


@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_equal_to_one_process(engine: str, optimizer: str) -> None:
    assert_equal_to_reference(2, engine=engine, **OPTIMIZERS[optimizer])


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ENGINES)
def test_it_goes_on_from_its_checkpoint(tmp_path: Path, engine: str) -> None:
    fields = SMALL | {"engine": engine}
    losses = save_at_six(tmp_path, 2, **fields)
    assert difference(tmp_path, losses, 1, **fields) < TOLERANCE


@pytest.mark.parametrize("engine", PLANNED_ENGINES)
def test_it_is_planned(engine: str) -> None:
    assert any(candidate.engine == engine for candidate in candidates(job(), hosts(2, 4)))


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_described(engine: str) -> None:
    spec = ENGINES[engine]
    assert spec.name == engine and spec.title and spec.summary and ":" in spec.implementation
    assert "dp" in spec.axes and "none" in spec.recompute
