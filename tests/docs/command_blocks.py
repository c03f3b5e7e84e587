"""Read the fenced blocks of a Markdown page, and check the flags of commands that cannot run here."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from megabench.cli.commands import app
from megabench.errors import UserError
from megabench.train.flags import parse_flags

# Why a block does not run in the tests. A page gives the reason in an HTML comment on the line above the block.
NEEDS = ("GPUs", "several hosts", "Slurm", "Kubernetes", "Docker", "SkyPilot", "several minutes")
REASONS = (*(f"needs: {name}" for name in NEEDS), "runs in: .ci/run")

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,})(?P<info>[^`]*)$")
_REASON = re.compile(r"^\s*<!-- (?P<reason>(?:needs|runs in):.*?) -->\s*$")
_TITLE = re.compile(r'\btitle="([^"]*)"')
_REDIRECTION = re.compile(r"\d?(?:>>?|<)\s*(?:&\d|[^\s;&|]+)")
_VARIABLE = re.compile(r"\w+=\S*$")  # a variable of the environment


class PageError(ValueError):
    """Raised for a page whose blocks cannot be read without doubt."""


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is the line of its opening fence, and `reason` says why it is not run."""

    line: int
    language: str
    text: str
    title: str | None = None
    reason: str | None = None


def read_blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page.

    Raises PageError for a block without language, a reason that is unknown or that stands above no bash block, a title
    that is not a plain file name, and a block that does not end.
    """
    blocks: list[Block] = []
    lines = page.splitlines()
    reason, number = None, 0
    while number < len(lines):
        line, number = lines[number], number + 1
        fence, found = _FENCE.match(line), _REASON.match(line)
        if reason and not (fence and fence["info"].split()[:1] == ["bash"]):
            raise PageError(f"line {number}: <!-- {reason} --> must stand directly above a ```bash block")
        if found and found["reason"] not in REASONS:
            raise PageError(
                f"line {number}: unknown reason <!-- {found['reason']} -->; use one of {', '.join(REASONS)}"
            )
        if not fence:
            reason = found["reason"] if found else None
            continue
        end = next((n for n in range(number, len(lines)) if lines[n].strip() == fence["ticks"]), None)
        if end is None:
            raise PageError(f"line {number}: the block does not end")
        inside = [text.removeprefix(fence["indent"]) for text in lines[number:end]]
        blocks.append(_block(number, fence["info"], "\n".join(inside) + "\n", reason))
        reason, number = None, end + 1
    if reason:
        raise PageError(f"line {number}: <!-- {reason} --> must stand directly above a ```bash block")
    return blocks


def _block(line: int, info: str, text: str, reason: str | None) -> Block:
    language = info.split()[0] if info.split() else ""
    if not language:
        raise PageError(f"line {line}: the block has no language; use ```text for output and ```bash for commands")
    title = found[1] if (found := _TITLE.search(info)) else None
    if title is not None and not re.fullmatch(r"\w[\w.-]*", title):
        raise PageError(f'line {line}: title="{title}" must be a plain file name')
    return Block(line, language, text, title, reason)


def script_of(blocks: Sequence[Block]) -> str:
    """Return a bash script that runs the bash blocks of a page in order, and writes each file before it is used."""
    parts = ["set -euo pipefail"]
    for block in blocks:
        if block.title:
            parts.append(f"cat > {block.title} <<'END_OF_THE_FILE'\n{block.text}END_OF_THE_FILE")
        elif block.language == "bash" and not block.reason:
            parts.append(f"printf '\\n%s\\n' {shlex.quote(mark_of(block))}\n{block.text}")
    return "\n".join(parts) + "\n"


def mark_of(block: Block) -> str:
    """Return the line that the script prints before a block."""
    return f"== the block at line {block.line}"


def flag_errors(text: str) -> list[str]:
    """Return what is wrong with the flags of the training and megabench commands of a bash block."""
    errors = []
    try:
        commands = list(commands_of(text))
    except ValueError as error:  # of shlex, e.g. for a quotation without an end
        return [f"{text.strip()}: {error}"]
    for command in commands:
        try:
            _parse(command)
        except _FLAG_ERRORS as error:
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            errors.append(f"{shlex.join(command)}: {message}")
    return errors


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(_REDIRECTION.sub(" ", line), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set(";&|()"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def _parse(words: Sequence[str]) -> None:
    """Parse the arguments of a command of this project, and ignore the arguments of the launcher before it."""
    for number, word in enumerate(words):
        arguments, is_module = list(words[number + 1 :]), number > 0 and words[number - 1] == "-m"
        if word.endswith("launch/pretrain.py") or (word == "megabench.train" and is_module):
            parse_flags(arguments)
            return
        if word.endswith("launch/compare.py"):
            _parse_command(["compare", *arguments])
            return
        if word.rpartition("/")[2] == "megabench" and (is_module or _starts_a_command(words[:number])):
            _parse_command(arguments)
            return


def _starts_a_command(before: Sequence[str]) -> bool:
    """Return whether only variables of the environment, or a launcher and its flags, stand before the word."""
    return all(_VARIABLE.match(word) for word in before) or before[0] in ("docker", "srun", "sky", "time")


def _parse_command(arguments: list[str]) -> None:
    """Parse the arguments of `megabench`, without running the command."""
    command: Any = typer.main.get_command(app)
    name = "megabench"
    while hasattr(command, "resolve_command") and arguments and not arguments[0].startswith("-"):
        context = command.make_context(name, [], resilient_parsing=True)
        first = arguments[0]
        name, command, arguments = command.resolve_command(context, arguments)
        if command is None:
            raise UserError(f"no command {first}")
    try:
        parsed = command.make_context(name, arguments)
    except typer.Exit:  # of --help and --version
        return
    if name == "train":
        parse_flags(parsed.args)


_UsageError: Any = typer.BadParameter.__base__  # typer does not export the base class of command-line errors
_FLAG_ERRORS = (UserError, _UsageError)
