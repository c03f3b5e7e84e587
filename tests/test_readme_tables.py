"""The tables of README.md and docs/results.md say what the records say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.readme_tables import PAGES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results.md"


def readme_tables(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/readme_tables.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_the_tables_are_up_to_date() -> None:
    done = readme_tables("--check")
    assert done.returncode == 0, done.stderr


def test_another_figure_is_seen_and_mended(tmp_path: Path) -> None:
    right = RESULTS.read_text(encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(re.sub(r"\| +\d+,\d{3} \|", "| 99,999 |", right, count=1), encoding="utf-8")
    done = readme_tables("--check", page, RESULTS)
    assert done.returncode == 1 and str(page) in done.stderr and str(RESULTS) not in done.stderr
    assert "| 99,999 |" in page.read_text(encoding="utf-8")
    assert readme_tables(page).returncode == 0
    assert page.read_text(encoding="utf-8") == right


def test_every_page_is_checked_without_arguments() -> None:
    """The default pages are those with tables, so that a new page is not forgotten."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    with_tables = {page for page in pages if "<!-- records: " in page.read_text(encoding="utf-8")}
    assert RESULTS in with_tables and with_tables <= set(PAGES)


def test_a_mark_without_an_end_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    mark, end = "<!-- records: benchmarks/llama3-8b-eight -->\n", "<!-- end of records -->\n"
    for text in (mark, f"{mark}words\n{mark}{end}", f"{mark}{end}words\n{end}"):
        page.write_text(text)
        done = readme_tables(page)
        assert done.returncode == 2 and "must be followed by exactly one <!-- end of records -->" in done.stderr
        assert page.read_text() == text


def test_colours_asked_for_do_not_reach_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert readme_tables("--check").returncode == 0


def test_a_study_that_is_not_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- records: benchmarks/none -->\n<!-- end of records -->\n")
    done = readme_tables(page)
    assert (
        done.returncode == 2
        and done.stderr.startswith(f"Error: {page}: ")
        and "contains no results.jsonl" in done.stderr
    )
