"""A stored checkpoint is loaded, and the run goes on as the one that wrote it did."""

import json
from pathlib import Path

import pytest

from tests import distributed
from tests.engines.equivalence import resolve
from tests.engines.test_resume import TOLERANCE, resumed_run
from tests.golden.checkpoints import FOLDER, WORK

pytestmark = pytest.mark.distributed

EXPECTED = json.loads((Path(__file__).parents[2] / FOLDER / "losses.json").read_text())[6:]


@pytest.mark.parametrize("tp", [1, 2])
def test_losses_are_those_of_the_run_that_saved(tp: int) -> None:
    run = resolve(tp, **WORK, tp=tp, load=FOLDER)
    assert distributed.run(resumed_run, tp, run)[0] == pytest.approx(EXPECTED, rel=TOLERANCE)
    assert len(EXPECTED) == 6


def test_without_the_moments_the_losses_differ() -> None:
    run = resolve(2, **WORK, tp=2, load=FOLDER)
    found = distributed.run(resumed_run, 2, run, "moments")[0]
    assert max(abs(ours - theirs) / theirs for ours, theirs in zip(found, EXPECTED, strict=True)) > 10 * TOLERANCE
