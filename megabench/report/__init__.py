"""HTML report of a study as a single self-contained page. Does not import torch."""

from collections.abc import Sequence
from pathlib import Path

from megabench.atomic_write import write_atomically
from megabench.doctor import Finding
from megabench.errors import UserError
from megabench.report.page import render
from megabench.study.results_directory import StudyRecords

__all__ = ["ReportError", "render", "write_report"]


class ReportError(UserError):
    """Raised when the report file cannot be written."""


def write_report(
    path: Path, study: StudyRecords, findings: Sequence[Finding], other: StudyRecords | None = None
) -> None:
    """Write the report page to `path` atomically. `other` is a second study to compare with the first.

    Raises ReportError if the file cannot be written.
    """
    page = render(study, findings, other)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}). Give another path with --out.") from None
