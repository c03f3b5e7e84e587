"""Read and check a study file and its trials, before any process starts. Loads no torch."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from megabench.config import (
    SETTINGS,
    ConfigError,
    ResolvedConfig,
    RunConfig,
    explain,
    hint,
    near_matches,
    read_yaml_mapping,
)
from megabench.config.auto import resolve_first
from megabench.config.record_fields import identity
from megabench.errors import UserError, near_names
from megabench.hardware.topology import Topology
from megabench.planner.predict import Predictor
from megabench.settings.bounds import NumRanks, NumRepeats, Seconds
from megabench.settings.network_limit import NetworkLimit
from megabench.specs.hints import is_known
from megabench.specs.registry import PROGRAMS, is_zero3
from megabench.study.expand import (
    SAFE_NAME,
    automatic_name,
    expand,
    full_form,
    list_fields,
    num_combinations,
    numbered,
    with_fields,
)
from megabench.study.masking import MASKED

# the study sets the output paths of its trials, and trials save no checkpoints
_TRIAL_FIELDS = [name for name, about in SETTINGS.items() if about.role != "output"]
_LONGEST_NAME = 200
_LONGEST_VARIABLE = 2**17 - 1  # Linux's limit MAX_ARG_STRLEN, which includes the final NUL byte
_MOST_TRIALS = 2000
_EXTRAS = ["name", "program", "env", "world_size", "timeout_seconds", "repeats"]
TRIAL_SETTINGS = _TRIAL_FIELDS + _EXTRAS  # settings that a trial may have
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# the kinds of question that a study asks
Question = Literal["fastest", "parity", "days", "scaling", "memory", "sweep", "crossover"]


class StudyError(UserError):
    """Raised if a study cannot be run. The message names the file and the trial."""


class StudyFile(BaseModel):
    """The content of a study file, before it is expanded into trials."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    name: str | None = None
    """Name of the study [default: the name of the file]."""
    question: str = ""
    """The question that the study answers, in one sentence."""
    answers: Question | None = None
    """The kind of answer that the report starts with [default: derived from the trials]: fastest, parity, days,
    scaling, memory, sweep or crossover."""
    base: dict[str, Any] = {}
    """Settings of all trials: RunConfig fields, env, world_size, timeout_seconds and repeats."""
    trials: list[dict[str, Any]] = Field(min_length=1)
    """Settings of each trial: name, RunConfig fields, env, world_size, timeout_seconds and repeats."""
    reference: str | None = None
    """Trial to compare with [default: the first ZeRO-3 trial]."""
    repeats: NumRepeats = 1
    """Number of runs of each trial, unless the trial sets it."""
    timeout_seconds: Seconds = 1800.0
    """Time limit of a trial, unless the trial sets it."""
    emulate_hosts: NumRanks | None = None
    """Split the machine into this many hosts."""
    emulate_network: NetworkLimit | None = None
    """Bandwidth and latency of the network between the hosts of `emulate_hosts`."""

    @classmethod
    def read(cls, path: Path) -> "StudyFile":
        """Read a study file. Raises StudyError if the file is invalid."""
        try:
            content = read_yaml_mapping(path)
        except ConfigError as error:
            raise StudyError(str(error)) from None
        for name in content:
            if name not in cls.model_fields:
                raise StudyError(f"{path}: unknown setting {name!r}; {_hint_at_top_level(str(name), content)}")
        if not content.get("trials"):
            raise StudyError(f"{path} has no trials; give a list of them, e.g. 'trials: [{{tp: 2}}, {{tp: 4}}]'")
        try:
            study = cls.model_validate(content)
        except ValidationError as error:
            raise StudyError(f"{path}: {explain(error, cls.model_fields)}") from None
        num_trials = sum(num_combinations(entry) for entry in study.trials)
        if num_trials > _MOST_TRIALS:
            raise StudyError(f"{path} expands to {num_trials:,} trials; use at most {_MOST_TRIALS:,} per study")
        return study

    @property
    def largest_world_size(self) -> int | None:
        """The largest world size in the file, or None if the file has none."""
        named = [trial.get("world_size") for entry in [self.base, *self.trials] for trial in expand(entry)]
        return max((size for size in named if isinstance(size, int)), default=None)

    @property
    def is_cpu_only(self) -> bool:
        """Whether every trial uses the CPU."""
        return self._devices == {"cpu"}

    @property
    def _devices(self) -> set[Any]:
        default = self.base.get("device")
        return {trial.get("device", default) for entry in self.trials for trial in expand(entry)}

    @property
    def needs_gpus(self) -> bool:
        """Whether every trial needs GPUs."""
        return self._devices == {"cuda"}

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of all trials that do not override them."""
        hosts = {"emulate_hosts": self.emulate_hosts, "emulate_network": self.emulate_network}
        hosts = {name: value for name, value in hosts.items() if value}
        return {"timeout_seconds": self.timeout_seconds, "repeats": self.repeats} | hosts | self.base


def hint_in_trial(name: str, value: object) -> str:
    """Return what to use instead of a setting that trials do not have."""
    if name in SETTINGS:
        return "trials write no checkpoints, and megabench compare --out DIR sets the directory of their results"
    return hint(name, TRIAL_SETTINGS, otherwise="megabench train --help lists the settings", value=value)


def _hint_at_top_level(name: str, content: Mapping[str, Any]) -> str:
    """Return what to use instead of a field `name` that study files do not have."""
    fields = [*StudyFile.model_fields]
    if name in TRIAL_SETTINGS:
        misplaced = {
            field: value if isinstance(value, str | int | float) else "…"
            for field, value in content.items()
            if field in TRIAL_SETTINGS and field not in fields
        }
        moved = ", ".join(f"{field}: {value}" for field, value in misplaced.items())
        return f"move settings of all trials into base: 'base: {{{moved}}}'"
    if near_names(name, fields) or not is_known(name):
        return near_matches(name, fields)
    return f"in base, which has the settings of all trials, {hint_in_trial(name, content[name])}"


@dataclass(frozen=True)
class Trial:
    """One configuration of a study, with its environment variables and its world size.

    `resolved` has the first valid value for each "auto" setting of `config`.
    """

    name: str
    config: RunConfig
    resolved: ResolvedConfig
    env: dict[str, str]
    timeout_seconds: float
    repeats: int = 1

    @property
    def world_size(self) -> int:
        return self.resolved.world_size

    @property
    def id(self) -> str:
        """Hash of all settings that affect the run. Equal identifiers mean the same run."""
        return identity(
            self.resolved, world_size=self.world_size, env=self.env, auto_settings=self.config.auto_settings
        )


@dataclass(frozen=True)
class Attempt:
    """One run of a trial, in one set of fresh processes."""

    trial: Trial
    repeat: int

    @property
    def folder(self) -> Path:
        """The directory of the run under `logs` and `tensorboard`, whatever the number of repeats is."""
        return run_folder(self.trial.name, self.repeat)

    @property
    def key(self) -> tuple[str, int]:
        """The key of the record of this run."""
        return self.trial.id, self.repeat


def run_folder(trial: str, repeat: int) -> Path:
    """Return the directory of a run: that of its trial for the first run, and a directory in it for every repeat."""
    return Path(trial, f"repeat-{repeat}") if repeat else Path(trial)


@dataclass(frozen=True)
class Study:
    """A study file, expanded and checked. `digest` is the hash of the content of the study.

    If the command line changes settings or adds planned trials, `as_run` is the text of the changed study file. With
    --plan, `predictor` predicts all trials.
    """

    name: str
    question: str
    source: Path
    digest: str
    trials: tuple[Trial, ...]
    reference: str
    answers: Question | None = None
    as_run: str | None = None
    predictor: Predictor | None = None

    @property
    def attempts(self) -> list[Attempt]:
        """All runs in order: a round with the first run of every trial, then a round with the second runs, and so on.

        The trials of a round run soon after each other, so slow changes of the machine affect all of them.
        """
        num_rounds = max(trial.repeats for trial in self.trials)
        return [
            Attempt(trial, repeat) for repeat in range(num_rounds) for trial in self.trials if repeat < trial.repeats
        ]

    def outline(self, only: Sequence[str], cluster: Topology | None = None) -> str:
        """Return the command and the time limit of each selected trial as text, on this machine or on a cluster."""
        trials = self.select(only)
        lines = [f"{self.name}: {sum(trial.repeats for trial in trials)} runs, against {self.reference}"]
        for trial in trials:
            times = f"{trial.repeats} × " if trial.repeats > 1 else ""
            hosts = cluster.host_of[: trial.world_size] if cluster and not trial.config.emulate_hosts else ()
            command = trial.config.command(trial.world_size, trial.env, [*Counter(hosts).values()])
            lines.append(f"{trial.name} ({times}{trial.timeout_seconds:g} s at most): {command}")
        return "\n".join(lines)

    def select(self, only: Sequence[str], option: str = "--only") -> list[Trial]:
        """Return the trials with a name or pattern in `only` (`tp2-*`), or all if `only` is empty.

        Raises StudyError if a pattern matches no trial. The message names `option`, which gave the patterns.
        """
        names = [trial.name for trial in self.trials]
        chosen: set[str] = set()
        for pattern in only:
            if not (found := [name for name in names if fnmatchcase(name, pattern)]):
                raise StudyError(
                    f"{option} {pattern} matches no trial of {self.source}; {near_matches(pattern, names)}"
                )
            chosen.update(found)
        return [trial for trial in self.trials if not only or trial.name in chosen]


def plan_study(
    file: StudyFile, source: Path, num_processes: int, device: Literal["cpu", "cuda"], only: Sequence[str] = ()
) -> Study:
    """Validate `file`, which was read from `source`, and return its study for a launch of `num_processes`.

    `device` is the default device.

    Raises StudyError for the first invalid setting. The message names the file, the trial and a remedy. Trials that
    `only` does not select may have a larger world_size.
    """
    for field in list_fields(file.base):
        raise StudyError(f"{source}: base.{field} is a list; lists expand only in trials; move it into the trials")
    for number, entry in enumerate(file.trials, 1):
        for field in [field for field in list_fields(entry) if not entry[field]]:
            raise StudyError(f"{source}: trial {number}: {field} is an empty list; add a value, or remove it")
    drafts = [
        _draft(
            file.defaults, entry, values, f"{source}: trial {number} ({_label(values)})", num_processes, device, only
        )
        for number, entry in enumerate(file.trials, 1)
        for values in expand(entry)
    ]
    trials = _named(drafts, source)
    study = Study(
        name=file.name or source.stem,
        question=file.question,
        source=source,
        digest=hashlib.sha256(file.model_dump_json().encode()).hexdigest(),
        trials=trials,
        reference=_reference(file.reference, trials, source),
        answers=file.answers,
    )
    for trial in study.select(only):
        _check_size(f"{source}: trial {trial.name}", trial.world_size, num_processes)
    return study


def _check_size(where: str, world_size: int, num_processes: int) -> None:
    """Raise StudyError if a trial needs more processes than the launch has."""
    if world_size > num_processes:
        raise StudyError(
            f"{where} needs {world_size} processes but the launch has {num_processes}; start {world_size}, lower its "
            f"world_size, or select other trials with --only"
        )


@dataclass(frozen=True)
class _Draft:
    """A checked trial that has no name yet.

    `stem` is the name of its entry, if there is one, and `varied` are the fields that vary in that entry.
    """

    where: str
    stem: str | None
    varied: dict[str, Any]
    given: dict[str, Any]
    config: RunConfig
    resolved: ResolvedConfig
    env: dict[str, str]
    timeout_seconds: float
    repeats: int


def _label(values: dict[str, Any]) -> str:
    """Return how error messages call a trial: by its name, or by the fields that it sets if it has no name."""
    return str(values.get("name") or ", ".join(f"{field}={value}" for field, value in values.items()) or "base alone")


def _draft(
    base: dict[str, Any],
    entry: dict[str, Any],
    values: dict[str, Any],
    where: str,
    num_processes: int,
    device: str,
    only: Sequence[str],
) -> _Draft:
    both = {**base, **values}
    for field in both:
        if field not in TRIAL_SETTINGS:
            raise StudyError(f"{where}: unknown setting {field!r}; {hint_in_trial(field, both[field])}")
    if "program" in both:
        both["engine"] = _program(both["program"], values, where)
    world_size = both.get("world_size", num_processes)
    if not is_valid(NumRanks, world_size):
        raise StudyError(f"{where}: world_size={world_size!r} must be a whole number of processes, e.g. 8")
    if not only:  # `only` may exclude this trial later, when all trials have names
        _check_size(where, world_size, num_processes)
    timeout = both["timeout_seconds"]
    if not is_valid(Seconds, timeout):
        raise StudyError(
            f"{where}: timeout_seconds={timeout!r} must be a positive number of seconds up to 1e7, e.g. 600"
        )
    repeats = both["repeats"]
    if not is_valid(NumRepeats, repeats):
        raise StudyError(f"{where}: repeats={repeats!r} must be a whole number of runs from 1 to 1000, e.g. 3")
    try:
        config = RunConfig.parse({field: both[field] for field in both if field not in _EXTRAS})
        if config.on_nan == "rollback":
            raise ConfigError("on_nan=rollback works only with megabench train: trials save no checkpoints; omit it")
        if config.device == "cuda" and device == "cpu":
            raise ConfigError("device=cuda, but no NVIDIA GPU was found here; use device: auto or cpu")
        kind: Literal["cpu", "cuda"] = "cpu" if "cpu" in (config.device, device) else "cuda"
        resolved = resolve_first(config, world_size, kind)
    except UserError as error:
        raise StudyError(f"{where}: {error}") from None
    if resolved.steps <= resolved.warmup_steps:
        raise StudyError(
            f"{where}: steps={resolved.steps} leaves no step to time after warmup_steps={resolved.warmup_steps}; use "
            f"more steps"
        )
    return _Draft(
        where=where,
        stem=_given_name(values, where),
        varied={field: values[field] for field in list_fields(entry) if field not in ("name", "env")},
        given={field: value for field, value in values.items() if field in _TRIAL_FIELDS or field == "world_size"},
        config=config,
        resolved=resolved,
        env=_variables(base.get("env"), where) | _variables(values.get("env"), where),
        timeout_seconds=timeout,
        repeats=repeats,
    )


def _program(program: object, values: Mapping[str, Any], where: str) -> str:
    """Return the name of the program that a trial runs instead of an engine."""
    if program not in PROGRAMS:
        raise StudyError(f"{where}: program={program!r} is not known; {near_matches(str(program), [*PROGRAMS])}")
    if "engine" in values:
        raise StudyError(f"{where}: a trial runs a program or an engine; remove program, or engine={values['engine']}")
    return str(program)


def is_valid(kind: Any, value: object) -> bool:
    """Return whether `value` is a number of this kind, with its bounds and without conversion."""
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _given_name(values: dict[str, Any], where: str) -> str | None:
    """Return the name of an entry, or None if it has no name."""
    if "name" not in values:
        return None
    name = values["name"]
    if not isinstance(name, str) or not SAFE_NAME.fullmatch(name):
        raise StudyError(
            f"{where}: name {name!r} cannot be used as a directory name; use letters, digits and . _ + = -, and "
            "begin with a letter or digit"
        )
    return name


def _variables(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    settings = value.values() if isinstance(value, dict) else [None]
    if not all(isinstance(setting, str | int | float) and not isinstance(setting, bool) for setting in settings):
        raise StudyError(f"{where}: env={value!r} must map variables to text or numbers, e.g. {{NCCL_P2P_LEVEL: NVL}}")
    for variable in value:
        if variable in _LAUNCHER_VARIABLES or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(variable)):
            raise StudyError(
                f"{where}: env cannot set {variable!r}; use a variable name that the launcher does not set"
            )
    variables = {str(variable): str(setting) for variable, setting in value.items()}
    for variable, setting in variables.items():
        if setting == MASKED:
            raise StudyError(
                f"{where}: env {variable} was removed from this copy of a study, because it seems to be a secret; use "
                f"the original study file, or write the value into this file"
            )
        if "\0" in setting or len(f"{variable}={setting}".encode()) > _LONGEST_VARIABLE:
            raise StudyError(
                f"{where}: env {variable} contains a NUL byte or exceeds {_LONGEST_VARIABLE} bytes, which no process "
                f"can receive; use a shorter text"
            )
    return variables


def _named(drafts: Sequence[_Draft], source: Path) -> tuple[Trial, ...]:
    """Return trials with names: the given names, or names from the layout and the settings that vary over the study.

    Fields that vary in an entry follow its given name, in full if another trial has their short form.
    """
    settings = [draft.resolved.every() for draft in drafts]
    varying = {name for name in [*_TRIAL_FIELDS, "world_size"] if len({str(each[name]) for each in settings}) > 1}
    proposals = [
        with_fields(draft.stem, draft.varied)
        if draft.stem
        else automatic_name(draft.resolved, {field: draft.given[field] for field in draft.given if field in varying})
        for draft in drafts
    ]
    count = Counter(proposals)
    proposals = [
        with_fields(draft.stem, draft.varied, full_form) if draft.stem and count[proposal] > 1 else proposal
        for proposal, draft in zip(proposals, drafts, strict=True)
    ]
    trials: dict[str, Trial] = {}
    by_id: dict[str, str] = {}
    for name, proposal, draft in zip(numbered(proposals), proposals, drafts, strict=True):
        if name in trials or (draft.stem and name != proposal):
            raise StudyError(f"{draft.where}: an earlier trial is also called {proposal!r}; use another name")
        if len(name) > _LONGEST_NAME:
            raise StudyError(f"{draft.where}: {name} is too long for a directory name; add a shorter name")
        trial = Trial(name, draft.config, draft.resolved, draft.env, draft.timeout_seconds, draft.repeats)
        if twin := by_id.get(trial.id):
            raise StudyError(
                f"{draft.where} is the same run as trial {twin!r}; to run a trial several times, use repeats"
            )
        trials[name] = trial
        by_id[trial.id] = name
    return tuple(trials.values())


def _reference(wanted: str | None, trials: Sequence[Trial], source: Path) -> str:
    names = [trial.name for trial in trials]
    if wanted is not None and wanted not in names:
        raise StudyError(f"{source}: reference {wanted!r} is not a trial of the study; {near_matches(wanted, names)}")
    zero3 = [trial.name for trial in trials if is_zero3(trial.resolved.engine, trial.resolved.options)]
    return wanted or (zero3 or names)[0]
