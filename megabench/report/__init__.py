"""The report of a study: one HTML page that people can send each other. Loads no torch."""

from collections.abc import Sequence
from pathlib import Path

from megabench import UserError
from megabench.doctor import Finding
from megabench.report.page import render
from megabench.study.folder import StudyRecords
from megabench.whole_file import write_whole

__all__ = ["ReportError", "render", "write_report"]


class ReportError(UserError):
    """A page that cannot be written."""


def write_report(
    path: Path, study: StudyRecords, findings: Sequence[Finding], other: StudyRecords | None = None
) -> None:
    """Writes the page to `path`, atomically. `other` is a second study to set beside the first.

    Raises ReportError where the file cannot be written.
    """
    page = render(study, findings, other)
    try:
        write_whole(path, page)
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}); give another path with --out") from None
