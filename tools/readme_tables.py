"""README's tables of results, from the records they tell of: `make readme-tables`.

What stands between `<!-- records: FOLDER -->` and `<!-- end of records -->` is replaced by the table of the study in
FOLDER. Running the tool again changes nothing.
"""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from megabench import UserError
from megabench.atomic_write import write_atomically
from megabench.study.results_directory import read_folder
from megabench.study.table import markdown

ROOT = Path(__file__).resolve().parents[1]
_START, _END = re.compile(r"<!-- records: (\S+) -->\n"), "<!-- end of records -->"


def main(
    file: Annotated[Path, typer.Argument(help="Markdown file, written in place.")] = ROOT / "README.md",
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where something would change.")] = False,
) -> None:
    """Put the tables of the measured studies into a Markdown file."""
    try:
        old = file.read_text()
        new = with_tables(old)
    except (UserError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if check and new != old:
        print(f"{file} does not tell what the records say; make readme-tables mends it", file=sys.stderr)
        raise typer.Exit(1)
    if not check:
        write_atomically(file, new)


def with_tables(text: str) -> str:
    """Return `text` with its marked tables regenerated from the repository's records.

    Raises UserError if a marker has no end.
    """
    before, *places = _START.split(text)  # text, followed by alternating directories and the text after their markers
    parts = [before]
    for folder, behind in zip(places[0::2], places[1::2], strict=True):
        if behind.count(_END) != 1:
            raise UserError(f"<!-- records: {folder} --> has no {_END} of its own; add one behind the table")
        study, rest = read_folder(ROOT / folder), behind.partition(_END)[2]
        parts.append(f"<!-- records: {folder} -->\n\n{markdown(study.records, study.reference)}\n\n{_END}{rest}")
    return "".join(parts)


if __name__ == "__main__":
    typer.run(main)
