"""`megabench doctor`: the findings of a folder of records, or of a study file, for people or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megabench import UserError
from megabench.doctor.examine import examine
from megabench.doctor.finding import Finding, Kind, names
from megabench.doctor.plan_rules import plan
from megabench.record import RunRecord
from megabench.study.parity import judge_parity
from megabench.study.results_directory import read_folder

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
        return _of_folder(path)
    if not path.is_file():
        raise DoctorError(f"{path} is not there; give a study file, or a folder with results.jsonl")
    if path.suffix not in (".yaml", ".yml"):
        raise DoctorError(f"{path} is no study file (.yaml); give one, or a folder with results.jsonl")
    return examine(*plan(path, num_processes, cluster))


def _of_folder(folder: Path) -> list[Finding]:
    """The findings of a study, or of a single run where there is none."""
    single = folder / "record.json"
    if (folder / "results.jsonl").exists() or not single.exists():
        study = read_folder(folder)
        return examine(study.records, study.reference)
    try:
        record = RunRecord.read(single)
    except ValueError as error:
        raise DoctorError(f"{single} cannot be read as a record ({str(error).splitlines()[0]})") from None
    return examine(judge_parity([record], record.trial), record.trial)


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
