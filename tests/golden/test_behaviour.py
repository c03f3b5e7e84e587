"""Help, plans, trial identities, record fields and results in the terminal are those of the golden files."""

from difflib import unified_diff

import pytest

from tests.golden.behaviour import FILES, behaviours

MAKERS = behaviours()


def test_every_file_has_a_maker() -> None:
    assert {path.name for path in FILES.iterdir()} == set(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_behaviour_is_unchanged(name: str) -> None:
    expected, found = (FILES / name).read_text(encoding="utf-8"), MAKERS[name]()
    difference = unified_diff(expected.splitlines(), found.splitlines(), "golden", "now", lineterm="", n=1)
    assert found == expected, "\n".join(list(difference)[:60])
