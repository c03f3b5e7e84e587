"""What megabench shows and writes, as text that a restructuring must not change.

`python -m tests.golden` writes it to tests/golden/files. Run it after an intended change, and justify the difference.
"""

import hashlib
import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

from rich.console import Console

from megabench import UserError
from megabench.config.requested_fields import requested_fields
from megabench.doctor import examine
from megabench.doctor.write_findings import write as write_findings
from megabench.report import render
from megabench.study.results_directory import read_folder
from megabench.study.study import StudyFile, plan_study
from megabench.study.table import show

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "files"
WIDTH = 120

COMMANDS = {
    "pretrain": ["launch/pretrain.py"],
    "compare-launched": ["launch/compare.py"],
    "megabench": ["-m", "megabench"],
    **{
        name: ["-m", "megabench", name]
        for name in ("compare", "doctor", "report", "topo", "transport", "calibrate", "plan", "convert")
    },
    **{f"convert-{name}": ["tools/convert.py", name] for name in ("import", "export", "verify", "inspect")},
    "preprocess": ["tools/preprocess.py"],
}
PLANS = {
    "8b-p5": ["--model", "llama3-8b", "--cluster", "p5.48xlarge:2"],
    "8b-one-gpu-pods": ["--model", "llama3-8b", "--cluster", "configs/clusters/one-gpu-pods.yaml"],
    "70b-p4d": ["--model", "llama3-70b", "--cluster", "p4d.24xlarge:8"],
    "gpt2-pairs": ["--model", "gpt2", "--cluster", "configs/clusters/a100-pairs.yaml"],
}


def run(arguments: list[str]) -> str:
    """The output of a command of this repository, standard error included."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "TERM": "dumb", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    return f"exit status {done.returncode}\n{done.stdout}{done.stderr}"


def studies() -> list[Path]:
    return sorted([*(ROOT / "configs" / "studies").glob("*.yaml"), *(ROOT / "benchmarks").glob("*/study.yaml")])


def measured() -> list[Path]:
    """The studies in benchmarks/ that have records."""
    return sorted(path.parent for path in (ROOT / "benchmarks").glob("*/results.jsonl"))


def expanded(path: Path) -> str:
    """Each trial of a study: its identity, its command, and the fields of its record that are known before it runs."""
    file = StudyFile.read(path)
    device = "cpu" if file.is_cpu_only else "cuda"
    source = path.relative_to(ROOT)
    try:
        study = plan_study(file, source, file.largest_world_size or 8, device)
    except UserError as error:
        return f"Error: {error}\n"
    trials = [
        {
            "trial": trial.name,
            "id": trial.id,
            "is_reference": trial.name == study.reference,
            "record": requested_fields(trial.resolved, trial.config, trial.env),
        }
        for trial in study.trials
    ]
    text = "\n".join(json.dumps(trial, default=_as_json, sort_keys=True, indent=1) for trial in trials)
    return f"digest {study.digest}\n{text}\n"


def _as_json(value: object) -> object:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


def shown(folder: Path) -> str:
    """What the terminal and the doctor say of a measured study, and the text of its report."""
    study = read_folder(folder)
    findings = examine(study.records, study.reference)
    terminal = Console(file=StringIO(), width=WIDTH)
    show(terminal, study.records, study.reference, study.answers)
    write_findings(terminal, findings, as_json=False)
    assert isinstance(terminal.file, StringIO)
    page = render(study, findings)
    digest = hashlib.sha256(page.encode()).hexdigest()
    return f"{terminal.file.getvalue()}\n{'-' * WIDTH}\nsha256 of the page: {digest}\n{text_of(page)}"


def text_of(page: str) -> str:
    """What a page shows, a line for each element that holds text; shapes of charts are left out."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    pieces = (html.unescape(piece).strip() for piece in re.sub(r"<[^>]*>", "\0", body).split("\0"))
    return "\n".join(" ".join(piece.split()) for piece in pieces if piece) + "\n"


def behaviours() -> dict[str, Callable[[], str]]:
    """What makes each file, by the file's name."""
    makers: dict[str, Callable[[], str]] = {}
    for name, command in COMMANDS.items():
        makers[f"help-{name}.txt"] = lambda command=command: run([*command, "--help"])
    for name, arguments in PLANS.items():
        makers[f"plan-{name}.txt"] = lambda arguments=arguments: run(["-m", "megabench", "plan", *arguments])
    for path in studies():
        name = path.parent.name if path.name == "study.yaml" else path.stem
        kind = "measured-study" if path.name == "study.yaml" else "study"
        makers[f"{kind}-{name}.txt"] = lambda path=path: expanded(path)
    for folder in measured():
        makers[f"shown-{folder.name}.txt"] = lambda folder=folder: shown(folder)
    return makers
