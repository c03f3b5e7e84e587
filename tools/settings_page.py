"""Generate docs/settings.md from the declarations of all settings: `make settings-page`.

With --check, the tool writes nothing and exits with status 1 if docs/settings.md is out of date.
"""

from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from megabench.config import FIELDS, SETTINGS, choices_of, literal_values
from megabench.settings.network_limit import NetworkLimit
from megabench.settings.setting import Setting
from megabench.specs.all_settings import engines_with

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_HEAD = """# Settings of a run

Every setting is a flag of `launch/pretrain.py` (`--global-batch 32`), a field of a YAML file (`global_batch: 32`), and
a field of a study's trials. This page is generated from the declarations of the settings by `make settings-page`.

The column "Resumed run" says whether a run that resumes a checkpoint may change the setting:

- *same*: no.
- *content*: the value may be another path or name, but only of the same model, data or engine.
- *logged*: yes, and the log mentions the change.
- *free*: yes.
"""
_RESUME = {"same": "same", "content": "content", "mention": "logged", "free": "free"}


def page() -> str:
    """Return the Markdown text of docs/settings.md with one table per panel of settings."""
    parts = [_HEAD]
    for panel, group in groupby(sorted(SETTINGS.items(), key=_panel_order), key=lambda item: item[1].panel):
        parts.append(f"\n## {panel}\n\n| Setting | Meaning | Values | Default | Engines | Resumed run |\n")
        parts.append("| --- | --- | --- | --- | --- | --- |\n")
        parts += [_row(name, about) for name, about in group]
    return "".join(parts)


def _panel_order(item: tuple[str, Setting]) -> int:
    panels = list(dict.fromkeys(about.panel for about in SETTINGS.values()))
    return panels.index(item[1].panel)


def _row(name: str, about: Setting) -> str:
    field = FIELDS[name]
    cells = [
        f"`{name}`",
        str(field.description).partition(" [default:")[0].removesuffix("."),
        ", ".join(map(str, choices_of(name))) or _values(field.annotation),
        _default(field),
        ", ".join(engines_with(name)) or "all",
        _RESUME[about.resume],
    ]
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |\n"


_KINDS: dict[Any, str] = {
    bool: "true, false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    NetworkLimit: "mapping",
}


def _values(annotation: Any) -> str:
    """Return the accepted values of a type annotation as text, such as "integer or auto"."""
    if choices := literal_values(annotation):
        return ", ".join(map(str, choices))
    arms = [arm for arm in get_args(annotation) if arm is not NoneType]
    if get_origin(annotation) is Annotated:
        return _values(arms[0])
    if get_origin(annotation) is tuple:
        return f"{len(arms)} × {_values(arms[0])}"
    return " or ".join(map(_values, arms)) if arms else _KINDS[annotation]


def _default(field: FieldInfo) -> str:
    if field.default is None:
        described = str(field.description).partition("[default: ")[2]
        return described.removesuffix(".").removesuffix("]") or "none"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return " ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Do not write; exit with status 1 if the page is out of date.")
    ] = False,
) -> None:
    """Write docs/settings.md, the page of all settings."""
    text = page()
    if check:
        raise typer.Exit(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
