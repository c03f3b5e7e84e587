"""Read the output directory of a study."""

from dataclasses import dataclass
from pathlib import Path

from megabench import UserError
from megabench.record import RunRecord, read_records
from megabench.study.parity import default_reference, judge_parity
from megabench.study.study import StudyFile


class FolderError(UserError):
    """Raised if the directory contains no study. The message names the missing file."""


@dataclass(frozen=True)
class StudyRecords:
    """The name, question and records of a study, with parity against the trial `reference`."""

    name: str
    question: str
    reference: str
    records: tuple[RunRecord, ...]


def read_folder(folder: Path) -> StudyRecords:
    """Read the output directory of `megabench compare`. Without study.yaml, the study has the name of the directory.

    Raises FolderError if there are no records, and RecordError or StudyError if a file is invalid.
    """
    path = folder / "results.jsonl"
    if not path.is_file():
        raise FolderError(f"{folder} contains no results.jsonl; use the --out directory of megabench compare")
    records = read_records(path)
    if not records:
        raise FolderError(f"{path} contains no record yet; wait until the first trial has ended")
    source = folder / "study.yaml"
    file = StudyFile.read(source) if source.is_file() else None
    reference = (file and file.reference) or default_reference(records)
    return StudyRecords(
        name=(file and file.name) or folder.absolute().name,
        question=file.question if file else "",
        reference=reference,
        records=tuple(judge_parity(records, reference)),
    )
