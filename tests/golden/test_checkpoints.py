"""Stored checkpoints are loaded, and the run goes on as the one that wrote them did."""

import json

import pytest

from tests import distributed
from tests.engines.equivalence import resolve
from tests.engines.test_resume import TOLERANCE, resumed_run
from tests.golden.checkpoints import ENGINES, FOLDER, WORK

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_are_those_of_the_run_that_saved(name: str, world_size: int) -> None:
    folder = FOLDER / name
    fields = ENGINES[name] | ({"tp": 1} if world_size == 1 else {})
    run = resolve(world_size, **WORK | fields, load=folder)
    expected = json.loads((folder / "losses.json").read_text())[6:]
    assert distributed.run(resumed_run, world_size, run)[0] == pytest.approx(expected, rel=TOLERANCE)
    assert len(expected) == 6


def test_without_the_moments_the_losses_differ() -> None:
    folder = FOLDER / "megatron"
    expected = json.loads((folder / "losses.json").read_text())[6:]
    run = resolve(2, **WORK | ENGINES["megatron"], load=folder)
    found = distributed.run(resumed_run, 2, run, "moments")[0]
    assert max(abs(ours - theirs) / theirs for ours, theirs in zip(found, expected, strict=True)) > 10 * TOLERANCE
