"""A short run of the chaos suite."""

from pathlib import Path

import pytest

from tests.chaos.__main__ import run_suite, summary
from tests.chaos.rollbacks import Findings, Plan, roll_back


@pytest.mark.e2e
def test_a_few_kills(tmp_path: Path) -> None:
    report = run_suite(6, 3, tmp_path)
    assert not report.problems, report.problems
    assert len(report.told) == 6, summary(report)


@pytest.mark.e2e
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_checkpoint_after_rollbacks_is_right(tmp_path: Path, mode: str) -> None:
    """Bad batches directly after a saved step, and two in a row, with a rank that writes late and --keep 1."""
    plan = Plan((2, "--tp 2"), mode, save_every=2, keep=1, bad=frozenset({6, 11, 12}), slow_rank=1, slow_seconds=0.3)
    assert [step for step, _, _ in plan.rollbacks()] == [7, 9, 7]
    findings = Findings()
    roll_back(plan, tmp_path, findings)
    assert findings.num_rollbacks == 3 and findings.num_inspected > 2 and findings.num_compared == 2
    assert not findings.problems, findings.problems
