"""Build the command line of a run from RunConfig, so that flags, YAML fields and help always agree.

Loads no torch.
"""

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from megabench import shipped
from megabench.config import FIELDS, SETTINGS, ConfigError, RunConfig, as_flag, choices_of, hint, read_yaml_mapping
from megabench.models.catalog import CATALOG
from megabench.settings.network_limit import NetworkLimit

# options of `megabench train` that are no settings of a run
LAUNCH_OPTIONS = {"nproc": "Number of processes [default: one per GPU; without GPUs, tp·cp·pp]."}


def parse_flags(arguments: Sequence[str] | None = None, program: str | None = None) -> RunConfig | None:
    """Parse a command line into a configuration. Return None if the user only asked for help.

    With a `program`, which the help names, the options of `megabench train` that are no settings are accepted, too.
    Raises ConfigError for unknown, malformed or invalid flags.
    """
    also = LAUNCH_OPTIONS if program else {}
    try:
        result = training_command(also)(args=arguments, prog_name=program, standalone_mode=False)
    except Exception as error:
        # an error of click, or of the copy of click inside newer versions of typer
        if (message := getattr(error, "format_message", None)) is None:
            raise
        words = sys.argv[1:] if arguments is None else arguments
        if hasattr(error, "possibilities"):  # an unknown option
            option = str(getattr(error, "option_name", ""))
            raise ConfigError(_unknown_option(option, words, also)) from None
        raise ConfigError(f"{message().rstrip('.')}; see --help") from None
    return result if isinstance(result, RunConfig) else None


def training_command(also: Mapping[str, str]) -> typer.Typer:
    """Return a command that has an option for every field of RunConfig and returns the configuration.

    `also` maps the names of other options for numbers, whose values it ignores, to their help.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": True})(_with_all_options(also))
    return app


def _with_all_options(also: Mapping[str, str]) -> Any:
    def train(context: typer.Context, config_file: Path | None, **flags: Any) -> RunConfig:
        """Train one model under one layout on all processes of the launcher.

        megabench train starts its processes on this machine. On several hosts, start torchrun … -m megabench.train on
        each host. The data-parallel size follows from the number of processes.
        """
        if context.args:
            raise ConfigError(_not_an_option(context.args[0]))
        from_file = read_yaml_mapping(config_file) if config_file else {}
        given = {name: value for name, value in flags.items() if value is not None and name not in also}
        return RunConfig.parse(from_file | given, where=f"{config_file}: " if config_file and not given else "")

    config_option = typer.Option("--config", metavar="FILE", help="YAML file with settings. Flags override the file.")
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, _parameter("config_file", Path, config_option)]
    for name, field in FIELDS.items():
        flag = as_flag(name)
        option = typer.Option(
            f"{flag}/{as_flag(name, 'false')}" if field.default is True else flag,
            help=f"{field.description}{_shown(field.default)}",
            metavar="|".join(map(str, choices_of(name))) or None,
        )
        parameters.append(_parameter(name, _plain_type(field.annotation), option))
    parameters += [_parameter(name, int, typer.Option(as_flag(name), help=text)) for name, text in also.items()]
    train.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return train


def option_and_value(option: str, words: Sequence[str]) -> tuple[str, str | None]:
    """Return how the user wrote an option in the command line `words`, and its value.

    Of "-tp 2", the parser reports the option "-t".
    """
    for place, given in enumerate(words):
        name, separator, value = given.partition("=")
        if name == option or (not option.startswith("--") and name.startswith(option)):
            following = words[place + 1] if place + 1 < len(words) else "-"
            return name, value if separator else None if following.startswith("-") else following
    return option, None


def _unknown_option(option: str, words: Sequence[str], also: Mapping[str, str]) -> str:
    """Return the error message for an unknown option in the command line `words`."""
    word, value = option_and_value(option, words)
    return f"unknown option {word}; {hint(word, [*SETTINGS, *also], as_flag, 'see --help', value)}"


def _not_an_option(word: str) -> str:
    """Return the error message for a word of the command line that belongs to no option."""
    name, separator, value = word.partition("=")
    if separator and name in SETTINGS:  # as Hydra spells options
        is_default = value.lower() == str(FIELDS[name].default).lower()
        remedy = f"omit it: {value} is the default" if is_default else f"did you mean {as_flag(name, value)}?"
    elif separator:
        remedy = hint(name, SETTINGS, as_flag, "see --help", value)
    elif word.lower() in ("true", "false"):
        remedy = "options such as --compile have no value"
    elif word in shipped.names("studies"):
        remedy = f"to run the study of this name, use megabench compare {word}"
    elif word in CATALOG or os.path.isdir(word):
        remedy = f"did you mean --model {word}?"
    elif Path(word).suffix in (".yaml", ".yml"):
        remedy = f"did you mean --config {word}, or megabench compare {word} for a study?"
    else:
        remedy = "use options, such as --model llama3-8b"
    return f"{word[:200]!r} is not an option; {remedy}"


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """Return a parameter for an option, which is None unless the user gives it."""
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown(default: Any) -> str:
    """Return the default in brackets. It is empty for None, whose meaning the description explains."""
    if default is None:
        return ""
    return f" [default: {' '.join(map(str, default)) if isinstance(default, tuple) else default}]"


def _plain_type(annotation: Any) -> Any:
    """Return the type that typer parses: without None, and without pydantic's bounds, which RunConfig checks."""
    arms = [arm for arm in get_args(annotation) if arm is not NoneType]
    if get_origin(annotation) in (Union, UnionType):
        return str if len(arms) > 1 else _plain_type(arms[0])  # "auto" or a number: RunConfig tells them apart
    if get_origin(annotation) is Annotated:
        return arms[0]
    if annotation is NetworkLimit:
        return str
    if get_origin(annotation) is tuple:
        return tuple[tuple(_plain_type(arm) for arm in arms)]  # type: ignore[misc]
    if get_origin(annotation) is Literal:
        return type(arms[0])  # RunConfig checks the value
    return annotation
