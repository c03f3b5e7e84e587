"""docs/settings.md is what the declarations say."""

from megabench.config import SETTINGS
from tools.settings_page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make settings-page"


def test_every_setting_has_a_row_and_no_cell_is_empty() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert sorted(line.split("`")[1] for line in rows) == sorted(SETTINGS)
    assert all(cell.strip() for line in rows for cell in line.strip("|").split("|"))
