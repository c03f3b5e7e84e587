"""Trials of a study for the report page: each trial has a letter and belongs to a work class."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from megabench.record import RunRecord
from megabench.study.columns import StudyTable, study_table
from megabench.study.results_directory import StudyRecords
from megabench.study.summary import Row, class_titles, reference_name, summarize
from megabench.study.verdict import Decision, Spread, decide, device_word, speeds_by_trial


@dataclass(frozen=True)
class Shown:
    """A trial on the report page. `letter` identifies the trial in every chart, and `number` selects its color."""

    letter: str
    number: int
    row: Row
    runs: tuple[RunRecord, ...]
    spread: Spread | None

    @property
    def record(self) -> RunRecord:
        """Return the record of the first run with a result, or of the first run if no run has a result."""
        return next((run for run in self.runs if run.work_class), self.runs[0])

    @property
    def name(self) -> str:
        return self.row.trial


@dataclass(frozen=True)
class WorkClassOfTrials:
    """Comparable trials of one work class, fastest first, and the decision which trial is best.

    `key` is None for trials without a result, which belong to no work class.
    """

    key: str | None
    title: str
    trials: tuple[Shown, ...]
    decision: Decision

    @property
    def measured(self) -> list[Shown]:
        """Return the trials with a measured speed, including trials whose status is not "ok"."""
        return [trial for trial in self.trials if trial.row.tokens_per_second_per_device]

    @property
    def best(self) -> Shown | None:
        return next((trial for trial in self.trials if trial.row is self.decision.best), None)

    @property
    def reference(self) -> Shown | None:
        return next((trial for trial in self.trials if trial.row is self.decision.reference), None)


@dataclass(frozen=True)
class StudyView:
    """The records of a study, arranged for the report page."""

    study: StudyRecords

    @cached_property
    def classes(self) -> list[WorkClassOfTrials]:
        """Return the trials in work classes, which did equal work, starting with the class of the reference.

        If the study has a single work class, trials without a result become its last rows. Otherwise, trials without
        a result form a separate class.
        """
        records, reference = self.study.records, self.study.reference
        rows, speeds, titles = summarize(records, reference), speeds_by_trial(records), class_titles(records)
        groups = [(key, list(group)) for key, group in groupby(rows, key=lambda row: row.work_class)]
        if len(groups) == 2 and groups[1][0] is None:
            groups = [(groups[0][0], groups[0][1] + groups[1][1])]
        numbers = {row.trial: number for number, row in enumerate(rows)}
        return [
            WorkClassOfTrials(
                key=key,
                title=titles.get(key, "Trials without a result"),
                trials=tuple(self._shown(row, numbers[row.trial], speeds.spreads.get(row.trial)) for row in group),
                decision=decide(group, speeds, self.head),
            )
            for key, group in groups
        ]

    @property
    def trials(self) -> list[Shown]:
        return [trial for group in self.classes for trial in group.trials]

    @property
    def head(self) -> str:
        """Return the display name of the reference, such as "ZeRO-3"."""
        return reference_name(self.study.records, self.study.reference)

    @cached_property
    def table(self) -> StudyTable:
        return study_table(self.study.records, self.study.reference, self.study.answers, self.study.budget)

    @property
    def device(self) -> str:
        return device_word(self.study.records)

    @property
    def is_cpu(self) -> bool:
        return any(record.device == "cpu" for record in self.study.records)

    @property
    def machine(self) -> str:
        """Describe the machine, such as "4 × NVIDIA H200 on 2 emulated hosts"."""
        return where_it_ran(self.study.records)

    def _shown(self, row: Row, number: int, spread: Spread | None) -> Shown:
        runs = tuple(record for record in self.study.records if record.trial == row.trial)
        return Shown(letters(number), number, row, runs, spread)


def where_it_ran(records: Sequence[RunRecord]) -> str:
    """Describe the devices and hosts of all records as text.

    Different world sizes are listed as "2, 4 and 8", different numbers of hosts as "on … and on …".
    """
    sizes = sorted({record.world_size for record in records})
    count = " and ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))
    devices = sorted({record.device for record in records if record.device}) or ["unknown devices"]
    hosts = {(record.num_hosts, bool(record.emulated_hosts)) for record in records if record.num_hosts} or {(1, False)}
    places = [f"{n} {'emulated ' * emulated}host{'s' * (n != 1)}" for n, emulated in sorted(hosts)]
    what = "CPU processes" if devices == ["cpu"] else "× " + " and ".join(devices)
    return f"{count} {what} on {' and on '.join(places)}"


def letters(number: int) -> str:
    """Return the letters of trial `number`, in the order A, B, …, Z, AA, AB, …."""
    return (letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)
