"""Suggestions for unknown names and values of settings. Loads no torch."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError

from megabench.errors import near_names
from megabench.optim.optimizers import OPTIMIZERS
from megabench.optim.schedules import SCHEDULES
from megabench.precision import POLICIES
from megabench.settings.other_programs import ANSWERS, SettingNamed, parts, plain_name
from megabench.settings.reading import literal_values
from megabench.settings.setting import meant_by
from megabench.specs.all_settings import FIELDS, SETTINGS
from megabench.specs.registry import ENGINES_AND_PROGRAMS

Spelling = Callable[..., str]  # formats the name of a setting, or its name and its value, as the user writes them
# for settings whose values are the names in a table: this table
TABLES: dict[str, Mapping[str, object]] = {
    "engine": ENGINES_AND_PROGRAMS,
    "precision": POLICIES,
    "schedule": SCHEDULES,
    "optimizer": OPTIMIZERS,
}
_NO = ("false", "no", "off", "none", "0")


def choices_of(name: str) -> tuple[Any, ...]:
    """Return the allowed values of a setting, or () if they cannot be listed."""
    return tuple(TABLES.get(name, ())) or literal_values(FIELDS[name].annotation)


def as_field(name: str, value: str | None = None) -> str:
    """Spell a setting as error messages do: "tp", "tp=2"."""
    return name if value is None else f"{name}={value}"


def as_flag(name: str, value: str | None = None) -> str:
    """Spell a setting as an option of a command: "--tp", "--tp 2", "--no-compile"."""
    words = name.replace("_", "-")
    if name in FIELDS and FIELDS[name].annotation is bool and value is not None:
        return f"--{'no-' * (value.lower() == 'false')}{words}"
    return f"--{words}" if value is None else f"--{words} {value}"


def hint(
    word: str, known: Iterable[str], spell: Spelling = as_field, otherwise: str | None = None, value: object = None
) -> str:
    """Suggest what to use instead of an unknown name: the answer for an option of another program, or similar names.

    `known` are the names that the user may give, and `spell` formats them. `otherwise` is the suggestion if nothing is
    similar, by default all of `known`. `value` is the value that the user gave to the unknown name.
    """
    names = list(known)
    plain = plain_name(word)
    last = plain.rpartition(".")[2]  # torchtitan's options are dotted: --parallelism.tensor_parallel_degree
    given = _scalar(value)
    for name in dict.fromkeys((plain, last)):
        answer = ANSWERS.get(f"{name}={_first_word(given)}") or _unless_off(ANSWERS.get(name), given)
        answer = answer or _unless_off(ANSWERS.get(name.removeprefix("no_")), "false")
        # an answer without settings is about runs, so it is given only where a run is described
        if answer and (_settings_of(answer) or {"steps"}) <= {*names}:
            return render(answer, spell, given)
    meant = meant_by(last, SETTINGS) or (last if "." in plain else None)
    if meant in names and meant in SETTINGS:
        return describe(meant, value, spell)
    if near := _near(plain, names, spell):
        return near
    return f"known: {', '.join(map(spell, names))}" if otherwise is None else otherwise


def is_known(word: str) -> bool:
    """Return whether `word` is a setting, or an option of another program that has an answer or is a synonym."""
    plain = plain_name(word)
    return any(
        name in SETTINGS or name in ANSWERS or meant_by(name, SETTINGS) is not None
        for name in (plain, plain.rpartition(".")[2])
    )


def describe(name: str, value: object, spell: Spelling) -> str:
    """Return the setting `name`, with the value that the user gave it, and its description.

    The answer for a value of another program replaces both, as for engine=zero3.
    """
    description, given = FIELDS[name].description, _scalar(value)
    if answer := ANSWERS.get(f"{name}={_first_word(given)}"):
        return render(answer, spell, given)
    if valid := valid_value(name, given):
        return f"here it is {spell(name, valid)}: {description}"
    choices = f" ({', '.join(map(str, choices_of(name)))})" if choices_of(name) else ""
    return f"here it is {spell(name)}{choices}: {description}"


def better_value(name: str, value: object) -> str | None:
    """Suggest what to use instead of an invalid value of the setting `name`, or return None."""
    given = _scalar(value)
    if answer := ANSWERS.get(f"{name}={_first_word(given)}"):
        return render(answer, as_field, given)
    valid = valid_value(name, given) if choices_of(name) else None
    return f"use {as_field(name, valid)}" if valid else None


def render(answer: str, spell: Spelling, given: str | None = None) -> str:
    """Return the text of an answer of `ANSWERS`, with `given` as the value that the user gave."""
    words = []
    for part in parts(answer):
        if isinstance(part, list):
            if len(part) == 1 and part[0].is_given and (other := ANSWERS.get(f"{part[0].name}={_first_word(given)}")):
                return render(other, spell)  # such as precision=bfloat16
            words.append(_group(part, spell, given))
        elif part.startswith("|"):
            words.append(given if given and _is_number(given) else part[1:])
        else:
            words.append(part)
    return "".join(words)


def valid_value(name: str, given: str | None) -> str | None:
    """Return the value of the setting `name` that a user types as `given`, or None if it is not valid.

    Choices may be in upper case: "AdamW" is adamw.
    """
    if given is None or not given:
        return None
    if choices := choices_of(name):
        return next((choice for choice in map(str, choices) if choice.replace("-", "_") == _first_word(given)), None)
    annotation = FIELDS[name].annotation
    is_boolean = given.lower() in ("true", "false")
    if annotation is bool or is_boolean:
        return given.lower() if is_boolean and annotation is bool else None
    if {str, Path} & {annotation, *get_args(annotation)}:
        return given
    with suppress(ValidationError):
        checked: Any = Annotated[annotation, FIELDS[name]]
        TypeAdapter(checked).validate_python(given)
        return given
    return None


def _group(settings: list[SettingNamed], spell: Spelling, given: str | None) -> str:
    spelled = []
    for one in settings:
        value = valid_value(one.name, given) if one.is_given else None
        spelled.append(spell(one.name, value or one.value))
    return (" " if spell is not as_field else " and ").join(spelled)


def _near(plain: str, names: list[str], spell: Spelling) -> str | None:
    if plain in names:  # spelled with underscores, as in --seq_length
        return f"did you mean {spell(plain)}?"
    near = near_names(plain, names)
    return f"did you mean {' or '.join(map(spell, near))}?" if near else None


def _settings_of(answer: str) -> set[str]:
    return {one.name for part in parts(answer) if isinstance(part, list) for one in part}


def _unless_off(answer: str | None, given: str | None) -> str | None:
    """Return the answer for an option that the user switches off, as in `--bf16 False`, or else `answer` itself."""
    off = _NO[:-1] if answer and "?" in answer else _NO  # 0 may be the value of an answer
    if answer and answer.startswith("use ") and (given or "").lower() in off:
        return f"omit it; to enable it, {answer}"
    return answer


def _scalar(value: object) -> str | None:
    """Return the text of a value that is not a list or a mapping."""
    return str(value).strip() if isinstance(value, str | int | float) and len(str(value)) < 200 else None


def _first_word(given: str | None) -> str:
    """Return the spelling of values in `ANSWERS`, of the first word: "FULL-SHARD auto_wrap" → "full_shard"."""
    words = (given or "").lower().replace("-", "_").split()
    return words[0] if words else ""


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False
