"""What a study left in its folder: the records, and what the study asked."""

from dataclasses import dataclass
from pathlib import Path

from megabench import UserError
from megabench.record import RunRecord, read_records
from megabench.study.parity import default_reference, judge_parity
from megabench.study.study import StudyFile


class FolderError(UserError):
    """A folder that holds no study; the message says what is missing."""


@dataclass(frozen=True)
class StudyRecords:
    """A study's name, question and records, with parity judged against the trial `reference`."""

    name: str
    question: str
    reference: str
    records: tuple[RunRecord, ...]


def read_folder(folder: Path) -> StudyRecords:
    """The study that `megabench compare --out FOLDER` left; without its study.yaml the folder gives the name.

    Raises FolderError where there are no records, and RecordError or StudyError for files that cannot be read.
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
