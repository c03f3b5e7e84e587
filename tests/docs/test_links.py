"""Relative links and anchors of the pages outside docs/ lead to files and headings. MkDocs checks docs/ itself."""

import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "launch/README.md")),
        *sorted(ROOT.glob("benchmarks/**/*.md")),
    )
    if path.exists()
]
_CODE = re.compile(r"^\s*(`{3,}).*?^\s*\1\s*$|(?<!`)(`+)(?!`).+?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^\s*(`{3,}).*?^\s*\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(
    r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s*(\S+)|(?:href|src|srcset)=\"([^\"]+)\"", re.MULTILINE
)
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)


def links_of(page: str) -> list[str]:
    """Return the targets of all links and pictures outside code."""
    return [unquote(next(filter(None, found))) for found in _LINK.findall(_CODE.sub("", page))]


def anchors_of(page: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page, and those of its HTML tags."""
    seen: Counter[str] = Counter()
    anchors = set(re.findall(r"\b(?:id|name)=\"([^\"]+)\"", page))
    for heading in _HEADING.findall(_FENCED.sub("", page)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def broken_links(path: Path) -> list[str]:
    """Return the relative links of a page that lead to no file or heading."""
    broken = []
    for link in links_of(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):  # https, mailto
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        has_anchors = anchor and target.suffix == ".md"
        if not target.exists() or (has_anchors and anchor not in anchors_of(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page(page: Path) -> None:
    assert broken_links(page) == []


def test_wrong_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text('# A `b` & c\n# Twice\n# Twice\n```\n# no heading\n```\n<a id="here"></a>\n')
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md#a-b--c) [b](other.md#twice-1) [c](#top) [d](other.md#here) <https://x.org> [e](https://x.org)\n"
        "`[no](link)`\n```text\n[no](link)\n```\n"
        "[f](gone.md) ![g](gone.svg) [h](other.md#twice-2) [i](#other) [j](other.md#no-heading)\n"
        '[k]: gone.txt\n<img src="gone.png">\n'
    )
    wrong = ["gone.md", "gone.svg", "other.md#twice-2", "#other", "other.md#no-heading", "gone.txt", "gone.png"]
    assert broken_links(page) == wrong
