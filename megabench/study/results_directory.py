"""Read the output directory of a study or of a single run."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megabench.errors import UserError
from megabench.inputs import read_text
from megabench.record import RunRecord, read_records
from megabench.study.expand import num_combinations
from megabench.study.masking import MASKED
from megabench.study.parity import default_reference, judge_parity
from megabench.study.study import Question, Study, StudyFile, plan_study
from megabench.study.summary import Budget

_MOST_CHECKED = 200  # trials of a study, which take about 10 ms each


class FolderError(UserError):
    """Raised if the directory contains no records. The message names the missing or invalid file."""


@dataclass(frozen=True)
class StudyRecords:
    """The name, question and records of a study, with parity against the trial `reference`.

    `answers` is the kind of answer that the study file asks for, if any. `budget` is the training run whose days and
    price are shown, by default 100 billion tokens. `confirm` is a sentence that says how to confirm the ranking, if
    that is known.
    """

    name: str
    question: str
    reference: str
    records: tuple[RunRecord, ...]
    answers: Question | None = None
    budget: Budget | None = None
    confirm: str | None = None


def read_folder(folder: Path, budget: Budget | None = None) -> StudyRecords:
    """Read the output directory of `megabench compare`. That of `megabench train` is read as a study of one trial.

    Without study.yaml, the study has the name of the directory. Raises FolderError if there are no records, and
    RecordError or StudyError if a file is invalid.
    """
    records = _read_records(folder)
    source = folder / "study.yaml"
    file = StudyFile.read(source) if source.is_file() else None
    study = _plan_again(file, source, records) if file else None
    reference = (file and file.reference) or default_reference(records)
    return StudyRecords(
        name=(file and file.name) or folder.absolute().name,
        question=file.question if file else "",
        reference=reference,
        records=tuple(judge_parity(records, reference)),
        answers=file.answers if file else None,
        budget=budget,
        confirm=how_to_confirm(folder, study, records) if study else None,
    )


def how_to_confirm(folder: Path, study: Study, records: Sequence[RunRecord]) -> str | None:
    """Return a sentence with the command that confirms the ranking of `study`, whose results are in `folder`.

    The command runs the copy of the study in `folder`. Return None if that is not possible: another release wrote the
    records, or the copy lacks a secret.
    """
    source = folder / "study.yaml"
    known = {trial.id for trial in study.trials}
    if not records or any(record.trial_id not in known for record in records):
        return None
    if not source.is_file() or MASKED in read_text(source):
        return None
    if any((record.num_hosts or 1) > 1 and not record.emulated_hosts for record in records):
        return "To confirm the ranking, start the study again on all hosts with --resume --confirm."
    num_processes = max(record.world_size for record in records)
    command = ["megabench", "compare", str(source), "--out", str(folder), "--nproc", str(num_processes)]
    return f"To confirm the ranking: {shlex.join([*command, *_only(study, records), '--resume', '--confirm'])}"


def _plan_again(file: StudyFile, source: Path, records: Sequence[RunRecord]) -> Study | None:
    """Return the study that wrote `records`, or None if its trials are invalid here or too many to check each time."""
    if sum(num_combinations(entry) for entry in file.trials) > _MOST_CHECKED:
        return None
    device: Literal["cpu", "cuda"] = "cpu" if all(record.device == "cpu" for record in records) else "cuda"
    size = max(record.world_size for record in records)
    try:
        return plan_study(file, source, size, device, [record.trial for record in records])
    except UserError:
        return None


def _only(study: Study, records: Sequence[RunRecord]) -> list[str]:
    """Return the options that select the trials with a record, if others have none."""
    names = {record.trial for record in records}
    if all(trial.name in names for trial in study.trials):
        return []
    return [word for trial in study.trials if trial.name in names for word in ("--only", trial.name)]


def _read_records(folder: Path) -> list[RunRecord]:
    path, single = folder / "results.jsonl", folder / "record.json"
    if path.is_file():
        if records := read_records(path):
            return records
        raise FolderError(f"{path} contains no record yet; wait until the first trial has ended")
    if not single.is_file():
        raise FolderError(
            f"{folder} contains no results.jsonl or record.json; use the --out directory of megabench compare or "
            f"megabench train"
        )
    return [RunRecord.read(single)]
