"""What megabench shows and writes, as text that a restructuring must not change.

`python -m tests.golden` writes it to tests/golden/files. Run it after an intended change, and justify the difference.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path

from rich.console import Console

from megabench.config.record_fields import requested_fields
from megabench.doctor import examine
from megabench.doctor.write_findings import write as write_findings
from megabench.study.results_directory import read_folder
from megabench.study.study import StudyFile, plan_study
from megabench.study.table import show

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "files"
WIDTH = 120

COMMANDS = {
    "megabench": ["-m", "megabench"],
    **{
        name: ["-m", "megabench", name]
        for name in (
            "compare",
            "doctor",
            "report",
            "pack",
            "unpack",
            "topo",
            "transport",
            "calibrate",
            "plan",
            "convert",
        )
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
MEASURED = ("gpt2-zero", "llama3-8b-fp8", "llama3-8b-two-hosts")
STUDIES = ("quickstart", *MEASURED)


def run(arguments: list[str]) -> str:
    """The output of a command of this repository, standard error included."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "TERM": "dumb", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    return f"exit status {done.returncode}\n{done.stdout}{done.stderr}"


def expanded(name: str) -> str:
    """Each trial of a study: its identity, and the fields of its record that are known before it runs."""
    source = Path("configs/studies") / f"{name}.yaml"
    file = StudyFile.read(ROOT / source)
    study = plan_study(file, source, file.largest_world_size or 8, "cpu" if file.is_cpu_only else "cuda")
    lines = [f"digest {study.digest}"]
    for trial in study.trials:
        lines += ["", f"{trial.name}{' (reference)' if trial.name == study.reference else ''}", f"  id: {trial.id}"]
        fields = requested_fields(trial.resolved, trial.config, trial.env)
        lines += [f"  {key}: {json.dumps(fields[key], default=_as_json, sort_keys=True)}" for key in sorted(fields)]
    return "\n".join(lines) + "\n"


def _as_json(value: object) -> object:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


def shown(name: str) -> str:
    """What the terminal and the doctor say of a measured study."""
    study = read_folder(ROOT / "benchmarks" / name)
    terminal = Console(file=StringIO(), width=WIDTH)
    show(terminal, study.records, study.reference, study.answers)
    write_findings(terminal, examine(study.records, study.reference), as_json=False)
    assert isinstance(terminal.file, StringIO)
    return terminal.file.getvalue()


def behaviours() -> dict[str, Callable[[], str]]:
    """What makes each file, by the file's name."""
    return {
        **{f"help-{name}.txt": partial(run, [*command, "--help"]) for name, command in COMMANDS.items()},
        **{f"plan-{name}.txt": partial(run, ["-m", "megabench", "plan", *work]) for name, work in PLANS.items()},
        **{f"study-{name}.txt": partial(expanded, name) for name in STUDIES},
        **{f"shown-{name}.txt": partial(shown, name) for name in MEASURED},
    }
