"""The Python interface behind the command line: `from megabench import Layout, compare, load, plan`.

The functions raise UserError for invalid input, with the message that the command line prints.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from megabench.doctor import examine
from megabench.doctor.finding import Finding
from megabench.errors import UserError
from megabench.parallel.layout import Layout
from megabench.planner.costs import Estimate
from megabench.planner.make_plan import make_plan
from megabench.planner.plan_table import write
from megabench.planner.reasons import chosen, why_nothing_fits
from megabench.planner.search import Plan
from megabench.planner.train_command import train_command
from megabench.record import RunRecord
from megabench.study.answers import Answer, answer
from megabench.study.compare_request import Request, find_study
from megabench.study.results_directory import StudyRecords, read_folder
from megabench.study.summary import Row, summarize
from megabench.study.table import markdown

__all__ = ["Layout", "StudyPlan", "StudyResults", "compare", "load", "plan"]


@dataclass(frozen=True)
class StudyResults:
    """The results of a study, as `compare` and `load` return them. A notebook shows the answer and the table."""

    folder: Path
    study: StudyRecords

    @property
    def records(self) -> tuple[RunRecord, ...]:
        """All runs, with every measured value."""
        return self.study.records

    @property
    def answer(self) -> Answer:
        """The answer to the study's question: a headline, and particulars of one sentence each."""
        return answer(self.records, self.study.reference, self.study.answers, self.study.budget, self.study.confirm)

    @property
    def trials(self) -> list[Row]:
        """One row per trial, with medians over its runs. The fastest comes first, within equal work."""
        return summarize(self.records, self.study.reference)

    @property
    def findings(self) -> list[Finding]:
        """The problems that `megabench doctor` reports, the worst first."""
        return list(examine(self.records, self.study.reference))

    def _repr_markdown_(self) -> str:
        return markdown(self.records, self.study.reference, self.study.answers, self.study.confirm)

    def __str__(self) -> str:
        return self._repr_markdown_()


@dataclass(frozen=True)
class StudyPlan:
    """Predictions for a model on a cluster, as `plan` returns them. Printing a plan shows its table."""

    prediction: Plan

    @property
    def ranked(self) -> Sequence[Estimate]:
        """The recommended candidate, then the fastest others, with step time, memory and the parts of a step."""
        return self.prediction.ranked

    @property
    def best(self) -> Estimate:
        """The recommended candidate. Its layout is `best.candidate.layout`."""
        return chosen(self.prediction)

    @property
    def command(self) -> str:
        """The command that trains with the recommended layout, for every host."""
        return train_command(self.prediction, self.best.candidate)

    def __str__(self) -> str:
        output = StringIO()
        write(Console(file=output, width=120, color_system=None, force_jupyter=False), self.prediction, 5)
        return output.getvalue()


def compare(
    study: str | Path,
    out: str | Path | None = None,
    *,
    num_processes: int | None = None,
    resume: bool = False,
    only: str | Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    emulate_hosts: int | None = None,
    repeats: int | None = None,
    confirm: bool = False,
    max_minutes: float | None = None,
) -> StudyResults:
    """Run a study on this machine, print what `megabench compare` prints, and return the results.

    Args:
        study: a study file, or the name of a shipped study.
        out: the output directory; by default runs/STUDY.
        num_processes: by default, the number of GPUs, or the study's largest world size on a machine without GPUs.
        resume: run only the trials that have no successful record yet.
        only: a name or pattern of the trials to run, or several; by default all trials.
        settings: settings that replace those of the study's base, or of trials, as in {"steps": 20, "tp2.tp": 4}.
        emulate_hosts: divide the processes into this number of hosts that communicate over sockets.
        repeats: run every trial this number of times; by default as the study file says.
        confirm: then repeat the fastest trials until the first place is decided.
        max_minutes: time for the additional runs of `confirm`; by default 60.

    Raises:
        UserError: the study cannot be run. No process has been started.
        KeyboardInterrupt: a signal stopped the study. `resume=True` continues it.
    """
    source = find_study(Path(study))
    folder = Path(out) if out else Path("runs", source.stem)
    given = tuple(f"{name}={json.dumps(value, default=str)}" for name, value in (settings or {}).items())
    chosen = (only,) if isinstance(only, str) else tuple(only)
    request = Request(
        source,
        folder,
        resume,
        chosen,
        emulate_hosts,
        settings=given,
        repeats=repeats,
        confirm=confirm,
        max_minutes=max_minutes,
    )
    planned, size = request.plan_here(num_processes)
    # these modules load torch
    from megabench.comparison.runner import run_here
    from megabench.supervisor.coordinator import signal_handlers_kept

    with signal_handlers_kept():
        status = run_here(request, planned, size)
    if status > 128:
        raise KeyboardInterrupt(f"signal {status - 128} stopped the study; compare(…, resume=True) continues it")
    return load(folder)


def load(folder: str | Path) -> StudyResults:
    """Return the results in an output directory of `compare` or `megabench train`. Raises UserError without records."""
    return StudyResults(Path(folder), read_folder(Path(folder)))


def plan(
    model: str | Path = "llama3-8b",
    cluster: str | None = None,
    *,
    seq_length: int | None = None,
    global_batch: int | None = None,
    num_layers: int | None = None,
    precision: str | None = None,
    fp8_recipe: str | None = None,
    num_layers_at_start_in_bf16: int = 0,
    num_layers_at_end_in_bf16: int = 0,
    grad_dtype: str = "fp32",
    optimizer: str = "adamw",
    profile: str | Path | None = None,
    fabric: str | Path | None = None,
    emulate_hosts: int | None = None,
    top: int = 12,
) -> StudyPlan:
    """Predict the fastest layouts of a model on a cluster, as `megabench plan` does, without a GPU.

    Args:
        model: a name of the catalogue, or a Hugging Face or checkpoint directory.
        cluster: TYPE:COUNT[:GPUS], a cluster file, or the name of a shipped cluster; by default this machine.
        seq_length: tokens per sequence; by default the model's.
        global_batch: sequences per optimizer step; by default the model's.
        num_layers: number of layers; by default the model's.
        precision: bf16, fp16, fp8 or fp32; by default bf16, and fp32 on CPU.
        fp8_recipe: tensorwise or bf16-gradients, with precision fp8; by default tensorwise.
        num_layers_at_start_in_bf16: number of first blocks that fp8 runs keep in bf16.
        num_layers_at_end_in_bf16: number of last blocks that fp8 runs keep in bf16.
        grad_dtype: dtype in which gradients are accumulated and reduced, fp32 or bf16.
        optimizer: adamw, sgd, adafactor or muon. Engines without this optimizer are left out.
        profile: a profile written by `megabench calibrate`; by default a shipped profile.
        fabric: measured collectives between the hosts: the output of nccl-tests or of `megabench calibrate`.
        emulate_hosts: divide this machine into this number of hosts that communicate over sockets.
        top: number of candidates in `ranked`.

    Raises:
        UserError: for invalid input, or if no layout fits.
    """
    found = make_plan(
        str(model),
        cluster,
        seq_length,
        global_batch,
        num_layers,
        grad_dtype,
        Path(profile) if profile else None,
        top,
        emulate_hosts,
        precision=precision,
        fp8_recipe=fp8_recipe,
        num_layers_at_start_in_bf16=num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16=num_layers_at_end_in_bf16,
        fabric=Path(fabric) if fabric else None,
        optimizer=optimizer,
    )
    if not found.ranked:
        raise UserError(why_nothing_fits(found))
    return StudyPlan(found)
