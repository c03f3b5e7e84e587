"""`megabench doctor`: the findings of a folder of records, or of a study file, for people or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megabench import UserError
from megabench.record import RunRecord, read_records
from megabench.study.doctor.examine import examine
from megabench.study.doctor.finding import Finding, Kind, names
from megabench.study.doctor.planned import plan
from megabench.study.parity import default_reference, judge_parity
from megabench.study.study import StudyError, StudyFile

_STYLES: dict[Kind, str] = {"untrustworthy": "bold red", "slow": "yellow", "note": "cyan"}
_NUM_AT_THE_TABLE = 2
WELL = "nothing to remark on"


class DoctorError(UserError):
    """A path that holds nothing to examine."""


def findings_at(path: Path, num_processes: int | None = None, cluster: str | None = None) -> list[Finding]:
    """The findings of the records in the folder `path`, or of the study file `path`; UserError when it is neither."""
    if path.is_dir():
        if num_processes or cluster:
            raise DoctorError(f"--nproc and --cluster are for a study file; {path} holds records of what was run")
        return examine(*_read_folder(path))
    if not path.is_file():
        raise DoctorError(f"{path} is not there; give a study file, or a folder with results.jsonl")
    if path.suffix not in (".yaml", ".yml"):
        raise DoctorError(f"{path} is no study file (.yaml); give one, or a folder with results.jsonl")
    return examine(*plan(path, num_processes, cluster))


def _read_folder(folder: Path) -> tuple[list[RunRecord], str]:
    """The records of a study, or the record of a single run, and the trial that ratios go by."""
    study, single = folder / "results.jsonl", folder / "record.json"
    source = study if study.exists() or not single.exists() else single
    if not source.exists():
        raise DoctorError(f"{folder} has no results.jsonl and no record.json; give the --out folder of a study or run")
    try:
        records = read_records(study) if source is study else [RunRecord.read(single)]
    except ValueError as error:
        raise DoctorError(f"{source} cannot be read as records ({str(error).splitlines()[0]})") from None
    if not records:
        raise DoctorError(f"{source} holds no record yet; run the study first")
    reference = _named_reference(folder / "study.yaml") or default_reference(records)
    return judge_parity(records, reference), reference


def _named_reference(study: Path) -> str | None:
    """The reference that the study's copy beside the records names; a study need not name one."""
    try:
        return StudyFile.read(study).reference if study.exists() else None
    except StudyError:
        return None


def write(console: Console, findings: Sequence[Finding], as_json: bool) -> None:
    """Writes the findings, worst first, or the one line that there are none."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
        return
    if not findings:
        console.print(WELL, highlight=False)
    for finding in findings:
        line = Text(finding.kind, style=_STYLES[finding.kind]).append(f"  {_sentence(finding)}", style="bold")
        console.print(line, soft_wrap=True)
        console.print(Text(f"  evidence: {finding.evidence}"), soft_wrap=True)
        console.print(Text(f"  change:   {finding.change}"), soft_wrap=True)


def write_head(console: Console, records: Sequence[RunRecord], reference: str, folder: Path) -> None:
    """How many findings a study has, and the worst of them; nothing where there are none."""
    findings = examine(records, reference)
    if not findings:
        return
    number = f"{len(findings)} finding" + "s" * (len(findings) > 1)
    console.print(Text(f"doctor: {number}, megabench doctor {folder} shows them", style="bold"), soft_wrap=True)
    for finding in findings[:_NUM_AT_THE_TABLE]:
        line = Text("  ").append(finding.kind, style=_STYLES[finding.kind]).append(f": {_sentence(finding)}")
        console.print(line, soft_wrap=True)


def _sentence(finding: Finding) -> str:
    return f"{names(finding.trials)}: {finding.what}" if finding.trials else finding.what
