"""Suggestions for unknown commands and options of `megabench`. Loads the settings only after a mistake."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup

from megabench import shipped
from megabench.errors import UserError, near_names

# other words for the commands
_COMMANDS = {
    "train": "pretrain finetune fine-tune launch run fit",
    "compare": "benchmark bench study sweep",
    "preprocess": "tokenize prepare",
    "topo": "topology",
    "plan": "predict estimate simulate",
    "doctor": "check diagnose",
    "report": "summary results plot",
    "parity": "equal equivalence verify",
    "calibrate": "profile measure",
    "convert export": "export",
    "convert import": "import",
}
# other words for options that are no settings of a run, spelled as in `ANSWERS`; "--cluster TYPE:COUNT" has a value
_OPTIONS = {
    "--nproc": "num_processes num_gpus n_gpus ngpus gpus nproc_per_node gpus_per_node world_size devices",
    "--cluster TYPE:COUNT": "instance instance_type gpu_type nodes nnodes num_nodes hosts num_hosts gpus num_gpus",
    "--out": "output output_dir output_path o",
    "--hf": "hf_dir model model_dir",
    "--ckpt": "checkpoint checkpoint_dir ckpt_dir model load",
    "--tokens": "num_tokens total_tokens train_tokens",
    "--workers": "num_workers num_proc preprocessing_num_workers",
    "--json": "as_json format output_format",
}


class SuggestingGroup(TyperGroup):
    """A group of commands that answers an unknown command or option with one sentence that suggests another one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["megabench.words"] = [*args]
        with _one_sentence(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.list_commands(ctx) and not ctx.resilient_parsing:
            raise UserError(_unknown_command(args[0], ctx.command_path, self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _one_sentence(ctx):
            return super().invoke(ctx)


@contextmanager
def _one_sentence(context: Any) -> Iterator[None]:
    """Raise UserError for an option that the command does not have."""
    try:
        yield
    except Exception as error:
        # an error of click, or of the copy of click inside newer versions of typer
        if not hasattr(error, "possibilities"):
            raise
        where = getattr(error, "ctx", None) or context
        option = str(getattr(error, "option_name", ""))
        raise UserError(_unknown_option(option, context.meta["megabench.words"], where)) from None


def _unknown_command(word: str, program: str, commands: list[str]) -> str:
    is_top = program == "megabench"
    others = {other: command for command, words in _COMMANDS.items() for other in words.split() if is_top}
    if is_top and word in shipped.names("studies"):
        remedy = f"did you mean megabench compare {word}?"
    elif command := others.get(word.lower()):
        remedy = f"did you mean megabench {command}?"
    elif near := near_names(word, commands) or [others[near] for near in near_names(word, others, most=1)]:
        remedy = f"did you mean {' or '.join(near)}?"
    else:
        remedy = f"use one of {', '.join(commands)}"
    return f"{program} has no command {word[:200]!r}; {remedy}"


def _unknown_option(option: str, words: list[str], context: Any) -> str:
    """Return the error message for an option that the command of `context` does not have."""
    from megabench.settings.other_programs import plain_name
    from megabench.train.flags import option_and_value

    word, value = option_and_value(option, words)
    command, plain = context.command_path, plain_name(word)
    options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    remedy = (
        _other_option(plain, value, options)
        or _setting(command, word, value, options)
        or _near(plain, options)
        or (_near_setting(word) if command == "megabench compare" else None)
        or f"see {command} --help"
    )
    return f"{command} has no option {word}; {remedy}"


def _other_option(plain: str, value: str | None, options: list[str]) -> str | None:
    for spelled, others in _OPTIONS.items():
        option, has_form, form = spelled.partition(" ")
        if option in options and plain in others.split():
            return f"use {option} {form}" if has_form else f"use {' '.join(filter(None, (option, value)))}"
    return None


def _near(plain: str, options: list[str]) -> str | None:
    by_name = {option.lstrip("-").replace("-", "_"): option for option in options}
    near = [by_name[name] for name in near_names(plain, by_name)]
    return f"did you mean {' or '.join(near)}?" if near else None


def _setting(command: str, word: str, value: str | None, options: list[str]) -> str | None:
    """Return what to use instead if the option means a setting of a run, as an option of this command or of others."""
    from megabench.config import SETTINGS, as_flag, hint
    from megabench.settings.other_programs import plain_name
    from megabench.specs.hints import describe, is_known
    from megabench.study.study import TRIAL_SETTINGS, hint_in_trial

    plain = plain_name(word)
    if not is_known(word):
        return None
    if as_flag(plain) in options:  # spelled with underscores
        return f"did you mean {as_flag(plain)}?"
    own = [name.removeprefix("--").replace("-", "_") for name in options]
    if plain not in SETTINGS and (said := hint(word, [name for name in own if name in SETTINGS], as_flag, "", value)):
        return said
    if command == "megabench":
        return f"begin with the command, as in megabench train {word}"
    if command != "megabench compare":
        return f"settings of a run are options of megabench train; {command} --help lists its own options"
    if plain in SETTINGS:
        return describe(plain, value, _as_set) if plain in TRIAL_SETTINGS else hint_in_trial(plain, value)
    return hint(word, TRIAL_SETTINGS, _as_set, "", value) or None


def _near_setting(word: str) -> str | None:
    """Return settings of trials whose names are similar."""
    from megabench.config import hint
    from megabench.study.study import TRIAL_SETTINGS

    return hint(word, TRIAL_SETTINGS, _as_set, "") or None


def _as_set(name: str, value: str | None = None) -> str:
    """Spell a setting as an option of `megabench compare`."""
    return f"--set {name}={value or 'VALUE'}"
