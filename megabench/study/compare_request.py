"""The request of `megabench compare`: the file or the shipped study, and the checks before torch is imported.

No process starts before these checks.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console
from rich.table import Table

from megabench import shipped
from megabench.errors import near_names
from megabench.hardware.facts import gpu_names
from megabench.runtime.emulated_network import EmulatedNetworkError
from megabench.runtime.shared_memory_network import create_network
from megabench.settings.bounds import NumRepeats
from megabench.settings.reading import parse_yaml
from megabench.study.expand import expand, list_fields
from megabench.study.locate import locating_file
from megabench.study.planned_trials import Planning
from megabench.study.study import (
    TRIAL_SETTINGS,
    Study,
    StudyError,
    StudyFile,
    Trial,
    hint_in_trial,
    is_valid,
    plan_study,
)

_MINUTES_TO_CONFIRM = 60.0
_MOST_MINUTES = 100_000


def find_study(given: Path, expected: str = "study file") -> Path:
    """Return the path of a study file, or of the shipped study of this name.

    Raises StudyError if `given` looks like a name and is none; the message says what was expected.
    """
    path = shipped.find("studies", given)
    if not path.is_file() and path.suffix not in (".yaml", ".yml") and path.name == str(given):
        close = " or ".join(near_names(str(given), shipped.names("studies")))
        raise StudyError(
            f"{given} is no {expected} or shipped study; {f'did you mean {close}? ' if close else ''}"
            f"megabench compare --list shows the shipped studies"
        )
    return path


def show_studies(console: Console) -> None:
    """Print the name, the hardware and the question of every shipped study."""
    table = Table(box=None, pad_edge=False)
    for heading in ("study", "needs", "question"):
        table.add_column(heading, no_wrap=heading != "question")
    for name in shipped.names("studies"):
        file = StudyFile.read(shipped.find("studies", name))
        size = file.largest_world_size
        gpus = f"{size} GPU{'s' * (size != 1)}" if size else "GPUs"
        table.add_row(name, "CPU" if file.is_cpu_only else gpus, file.question)
    console.print(table)
    console.print("\nRun a study: megabench compare NAME. Show its commands: megabench compare NAME --dry-run.")


@dataclass(frozen=True)
class Request:
    """A study file, the directory for its results, and the selection of its runs."""

    source: Path
    out: Path
    resume: bool = False
    only: tuple[str, ...] = ()
    emulate_hosts: int | None = None
    planning: Planning | None = None
    settings: tuple[str, ...] = ()
    repeats: int | None = None
    confirm: bool = False
    max_minutes: float | None = None
    locate: str | None = None

    @property
    def minutes_to_confirm(self) -> float:
        """The time for the additional runs of --confirm."""
        return _MINUTES_TO_CONFIRM if self.max_minutes is None else self.max_minutes

    def read_study(self) -> StudyFile:
        """Read the study file, and add the settings of the command line that apply to all trials to its base."""
        if self.max_minutes is not None and not self.confirm:
            raise StudyError("--max-minutes works only with --confirm; add --confirm, or leave out --max-minutes")
        if not 0 < self.minutes_to_confirm <= _MOST_MINUTES:
            raise StudyError(
                f"--max-minutes {self.max_minutes} must be a positive number of minutes up to {_MOST_MINUTES:,}, "
                f"e.g. 30"
            )
        file = self._with_repeats(StudyFile.read(self.source))
        given: dict[str, Any] = {"emulate_hosts": self.emulate_hosts} if self.emulate_hosts else {}
        given |= {field: value for trial, field, value in map(_setting, self.settings) if not trial}
        return file.model_copy(update={"base": file.base | given})

    def _with_repeats(self, file: StudyFile) -> StudyFile:
        """Return `file` with the repeats that --repeats gives all trials."""
        if self.repeats is None:
            return file
        if not is_valid(NumRepeats, self.repeats):
            raise StudyError(f"--repeats {self.repeats!r} must be a whole number of runs from 1 to 1000, e.g. 3")
        if given := [setting for setting in self.settings if _setting(setting)[1] == "repeats"]:
            raise StudyError(f"--repeats {self.repeats} and --set {given[0]} both set the repeats; use one of them")
        trials = [{field: entry[field] for field in entry if field != "repeats"} for entry in file.trials]
        base = {field: file.base[field] for field in file.base if field != "repeats"}
        return file.model_copy(update={"repeats": self.repeats, "base": base, "trials": trials})

    def plan_launched(self, num_processes: int) -> Study:
        """Validate the study and return it for a launch of `num_processes`. Raises StudyError."""
        file = self.read_study()
        self._check_gpus(file)
        study = self._planned(file, num_processes)
        for trial in study.select(self.only):
            if trial.resolved.emulate_network:
                raise StudyError(
                    f"{self.source}: trial {trial.name}: emulate_network needs one process that starts all ranks; "
                    f"start megabench compare on one machine without torchrun, or omit emulate_network"
                )
        return study

    def plan_here(self, num_processes: int | None, starts: bool = True) -> tuple[Study, int]:
        """Validate the study, and return it with the number of processes to start on this machine.

        If `num_processes` is None, one process is started per GPU. Without GPUs, and for a CPU study, the number is the
        largest world size in the study. If no process `starts`, a GPU study needs no GPU.
        """
        if num_processes is not None and num_processes < 1:
            raise StudyError(f"{num_processes} processes cannot run a study; use 1 or more")
        file = self.read_study()
        num_gpus = len(gpu_names())
        if starts:
            self._check_gpus(file)
        default = file.largest_world_size if file.is_cpu_only or not num_gpus else num_gpus
        if not (size := num_processes or default):
            missing = "no NVIDIA GPU was found" if not num_gpus else "it runs on CPU alone"
            raise StudyError(f"{self.source} has no world_size and {missing}; add --nproc N, or world_size to base")
        study = self._planned(file, size)
        for trial in study.select(self.only):
            check_data(f"{self.source}: trial {trial.name}", trial.resolved.data)
            if starts:
                self._check_network(trial)
            if starts and trial.resolved.device == "cuda" and trial.world_size > num_gpus:
                raise StudyError(
                    f"{self.source}: trial {trial.name} needs {trial.world_size} GPUs and this machine has {num_gpus}; "
                    f"use --nproc {num_gpus}, or device: cpu to try it without GPUs"
                )
        return study, size

    def _check_gpus(self, file: StudyFile) -> None:
        """Raise StudyError if a study for GPUs would start on a machine without GPUs."""
        if not file.needs_gpus or gpu_names():
            return
        small = f"{self.source.stem}-small"
        twin = f"; megabench compare {small} runs its small version on CPUs" * (small in shipped.names("studies"))
        raise StudyError(
            f"{self.source} needs GPUs, and no NVIDIA GPU was found here. compare --dry-run prints its commands, and "
            f"doctor --cluster examines it for another machine{twin}."
        )

    def _check_network(self, trial: Trial) -> None:
        """Raise StudyError if the network of a trial cannot be emulated here, by creating the network once."""
        run = trial.resolved
        if not (limit := run.emulate_network) or not run.emulate_hosts:
            return
        try:
            with create_network(limit.transport, run.emulate_hosts, limit.gb_per_s, limit.latency_us):
                pass
        except EmulatedNetworkError as error:
            raise StudyError(f"{self.source}: trial {trial.name}: {error}") from None

    def _planned(self, file: StudyFile, num_processes: int) -> Study:
        """Validate the study and return it, with the best predicted layouts if --plan is given."""
        device: Literal["cpu", "cuda"] = "cuda" if gpu_names() or file.needs_gpus else "cpu"
        predictor = None
        file = self._with_trial_settings(file, num_processes, device)
        if self.locate:
            # the trials that are not located may be larger than this launch
            enough = max(num_processes, file.largest_world_size or 0)
            file = locating_file(plan_study(file, self.source, enough, device), self.locate)
        if self.planning:
            file, predictor = self.planning.extend(file, self.source, num_processes)
        study = plan_study(file, self.source, num_processes, device, self.only)
        planned = predictor.planned if predictor else ()
        if planned and not {trial.name for trial in study.select(self.only)} & set(planned):
            raise StudyError(
                f"--only selects none of the {len(planned)} trials that --plan added; add --only 'plan-*' to run them, "
                f"or remove --plan"
            )
        if not (self.planning or self.settings or self.emulate_hosts or self.repeats or self.locate):
            return study
        named = file.model_copy(update={"name": study.name})
        as_run = yaml.safe_dump(named.model_dump(exclude_defaults=True), sort_keys=False)
        return replace(study, predictor=predictor, as_run=as_run)

    def _with_trial_settings(self, file: StudyFile, num_processes: int, device: Literal["cpu", "cuda"]) -> StudyFile:
        """Return `file` with the command line's settings of individual trials (--set TRIAL.FIELD=VALUE)."""
        given = [setting for setting in map(_setting, self.settings) if setting[0]]
        if not given:
            return file
        # the settings may lower a world size, so the names are found without its check
        enough = max(num_processes, file.largest_world_size or 0)
        study = plan_study(file, self.source, enough, device, self.only)
        entries = [values for entry in file.trials for values in expand(entry)]
        named = {trial.name: entry for trial, entry in zip(study.trials, entries, strict=True)}
        for pattern, field, value in given:
            if list_fields({field: value}):
                raise StudyError(
                    f"--set {pattern}.{field} has several values; set one value, or add trials to the file"
                )
            for trial in study.select([pattern], "--set"):
                named[trial.name] = named[trial.name] | {field: value}
        return file.model_copy(update={"trials": [entry | {"name": name} for name, entry in named.items()]})


def check_data(where: str, data: str) -> None:
    """Raise StudyError unless `data` is built in or exists as a file, or as a token file without its suffix."""
    if data not in ("stdlib", "synthetic") and not Path(data).exists() and not Path(f"{data}.bin").exists():
        raise StudyError(f"{where}: data={data} does not exist; use stdlib, synthetic, or the path of a file")


def _setting(text: str) -> tuple[str, str, Any]:
    """Return the trial, the field and the value of "FIELD=VALUE" or "TRIAL.FIELD=VALUE".

    The trial is "" if the setting applies to all trials. The value is parsed as in a study file.
    """
    key, separator, value = text.partition("=")
    trial, _, field = key.rpartition(".")
    if not separator or not field:
        raise StudyError(f"--set {text} has no value; use FIELD=VALUE with a field of the study's base, e.g. steps=20")
    if field in ("name", "env"):
        raise StudyError(f"--set {text}: {field} is not a setting of a run; set it in the study file")
    if field not in TRIAL_SETTINGS:
        raise StudyError(f"--set {text}: unknown setting {field!r}; {hint_in_trial(field, value)}")
    try:
        parsed = parse_yaml(value)
        # YAML reads text with a colon as a mapping; the only setting with a mapping as its value also accepts its text
        return trial, field, value if isinstance(parsed, dict) else parsed
    except (yaml.YAMLError, ValueError):
        raise StudyError(f"--set {text}: {value!r} is not valid YAML; quote the value as in a study file") from None
