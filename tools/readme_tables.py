"""Update the result tables of README.md and docs/results.md from the records of the studies: `make readme-tables`.

The tool replaces the text between `<!-- records: FOLDER -->` and `<!-- end of records -->` with the results table of
the study in FOLDER. Running the tool twice gives the same file as running the tool once.
"""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from megabench.atomic_write import write_atomically
from megabench.errors import UserError
from megabench.study.results_directory import read_folder
from megabench.study.table import markdown

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs/results.md"]
_START, _END = re.compile(r"<!-- records: (\S+) -->\n"), "<!-- end of records -->"


def main(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Markdown files with the tables to update [default: README.md and docs/results.md]."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Do not write; exit with status 1 if a table is out of date.")
    ] = False,
) -> None:
    """Write the results tables of the measured studies into Markdown files."""
    is_old = False
    for file in files or PAGES:
        try:
            old = file.read_text(encoding="utf-8")
            new = with_tables(old)
        except (UserError, OSError) as error:
            print(f"Error: {file}: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        if not check:
            write_atomically(file, new)
        elif new != old:
            is_old = True
            print(
                f"The tables in {file} differ from the records. Run make readme-tables to update the tables.",
                file=sys.stderr,
            )
    if is_old:
        raise typer.Exit(1)


def with_tables(text: str) -> str:
    """Return `text` with every marked table regenerated from the records in the repository.

    Raise UserError if a start mark has no end mark.
    """
    # `places` contains, for each start mark, the folder in the mark and the text after the mark
    before, *places = _START.split(text)
    parts = [before]
    for folder, behind in zip(places[0::2], places[1::2], strict=True):
        if behind.count(_END) != 1:
            raise UserError(
                f"<!-- records: {folder} --> must be followed by exactly one {_END}. Add {_END} after the table."
            )
        study, rest = read_folder(ROOT / folder), behind.partition(_END)[2]
        table = markdown(study.records, study.reference, study.answers)
        parts.append(f"<!-- records: {folder} -->\n\n{table}\n\n{_END}{rest}")
    return "".join(parts)


if __name__ == "__main__":
    typer.run(main)
