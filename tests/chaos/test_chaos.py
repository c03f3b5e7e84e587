"""A short run of the chaos suite."""

from pathlib import Path

import pytest

from tests.chaos.__main__ import run_suite, summary


@pytest.mark.e2e
def test_a_few_kills(tmp_path: Path) -> None:
    report = run_suite(3, 3, tmp_path)
    assert not report.problems, report.problems
    assert len(report.told) == 3, summary(report)
