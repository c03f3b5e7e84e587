"""Output of `megabench doctor`: the findings for a run directory or a study file, as text or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megabench.cost.fabric_files import read_fabric
from megabench.doctor.examine import examine
from megabench.doctor.finding import Finding, Kind, names
from megabench.doctor.plan_rules import plan, rule_for_records
from megabench.errors import UserError
from megabench.record import RunRecord
from megabench.study.results_directory import read_folder

_STYLES: dict[Kind, str] = {
    "fails": "bold red",
    "untrustworthy": "bold red",
    "preliminary": "magenta",
    "slow": "yellow",
    "note": "cyan",
}
_NUM_AT_THE_TABLE = 2
WELL = "no problems found"


class DoctorError(UserError):
    """Raised when a path contains no study and no records."""


def findings_at(
    path: Path, num_processes: int | None = None, cluster: str | None = None, fabric: Path | None = None
) -> list[Finding]:
    """Return the findings for the run directory or the study file at `path`.

    `fabric` is a file with measured collectives between the hosts of the study.

    Raises UserError if `path` is neither a directory with records nor a study file.
    """
    if path.is_dir():
        if num_processes or (cluster and not fabric):
            wrong = "--nproc" if num_processes else "--cluster"
            raise DoctorError(f"{wrong} works only with a study file, but {path} is a directory. Remove {wrong}.")
        study = read_folder(path)
        rules = (rule_for_records(study.records, read_fabric(fabric), cluster),) if fabric else ()
        return examine(study.records, study.reference, rules)
    if not path.is_file():
        raise DoctorError(f"{path} does not exist. Give a study file, or a directory with results.jsonl.")
    if path.suffix not in (".yaml", ".yml"):
        raise DoctorError(f"{path} is not a study file (.yaml). Give a study file, or a directory with results.jsonl.")
    return examine(*plan(path, num_processes, cluster, read_fabric(fabric) if fabric else None))


def write(console: Console, findings: Sequence[Finding], as_json: bool) -> None:
    """Print the findings, most severe first, or one line that states that there are none."""
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
    """Print the number of findings of a study and the most severe ones. Print nothing if there are none."""
    findings = examine(records, reference)
    if not findings:
        return
    number = f"{len(findings)} finding" + "s" * (len(findings) > 1)
    console.print(Text(f"doctor: {number}. Run megabench doctor {folder} for details.", style="bold"), soft_wrap=True)
    for finding in findings[:_NUM_AT_THE_TABLE]:
        line = Text("  ").append(finding.kind, style=_STYLES[finding.kind]).append(f": {_sentence(finding)}")
        console.print(line, soft_wrap=True)


def _sentence(finding: Finding) -> str:
    return f"{names(finding.trials)}: {finding.what}" if finding.trials else finding.what
