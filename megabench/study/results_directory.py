"""Read the output directory of a study or of a single run."""

from dataclasses import dataclass
from pathlib import Path

from megabench.errors import UserError
from megabench.record import RunRecord, read_records
from megabench.study.parity import default_reference, judge_parity
from megabench.study.study import Question, StudyFile
from megabench.study.summary import Budget


class FolderError(UserError):
    """Raised if the directory contains no records. The message names the missing or invalid file."""


@dataclass(frozen=True)
class StudyRecords:
    """The name, question and records of a study, with parity against the trial `reference`.

    `answers` is the kind of answer that the study file asks for, if any. `budget` is the training run whose days and
    price are shown, by default 100 billion tokens.
    """

    name: str
    question: str
    reference: str
    records: tuple[RunRecord, ...]
    answers: Question | None = None
    budget: Budget | None = None


def read_folder(folder: Path, budget: Budget | None = None) -> StudyRecords:
    """Read the output directory of `megabench compare`. That of `megabench train` is read as a study of one trial.

    Without study.yaml, the study has the name of the directory. Raises FolderError if there are no records, and
    RecordError or StudyError if a file is invalid.
    """
    records = _read_records(folder)
    source = folder / "study.yaml"
    file = StudyFile.read(source) if source.is_file() else None
    reference = (file and file.reference) or default_reference(records)
    return StudyRecords(
        name=(file and file.name) or folder.absolute().name,
        question=file.question if file else "",
        reference=reference,
        records=tuple(judge_parity(records, reference)),
        answers=file.answers if file else None,
        budget=budget,
    )


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
