"""Finds what a configuration leaves to be found ("auto") by short runs of it, each in fresh processes.

One that runs out of memory then takes nothing with it and leaves nothing behind.
"""

import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megabench import UserError
from megabench.config import RunConfig
from megabench.record import Probe, Status
from megabench.runtime.device import DeviceKind
from megabench.runtime.messages import Progress
from megabench.runtime.rendezvous import Rendezvous
from megabench.study.crew import Crew, StudyStopped, note_signals
from megabench.study.launch import launch_of
from megabench.study.search import Search, Setting, legal_settings, probe_config, settle
from megabench.study.study import Trial
from megabench.study.tasks import TRAINER, Tasks, task_of


class NothingFitsError(UserError):
    """No setting that was tried could run; `status` is that of the last."""

    def __init__(self, sentence: str, status: Status, num_hosts: int) -> None:
        super().__init__(sentence)
        self.status, self.num_hosts = status, num_hosts


def tune(
    tasks: Tasks,
    trial: Trial,
    logs: Path,
    say: Callable[[str], None],
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Setting, list[Probe]]:
    """The fastest setting that fits of what `trial` leaves to be found, with all that was tried. For the lead alone.

    Each probe logs to a folder of its own in `logs`. Raises NothingFitsError where none could run, and where one
    failed by anything but a lack of memory while none before it was good.
    """
    config, run = trial.config, trial.resolved
    search = Search(legal_settings(config, run.world_size, run.device), run)
    while setting := search.next():
        short = probe_config(config, setting, run.world_size, run.device)
        folder = logs / "probes" / f"micro-batch{setting.micro_batch}-{setting.recompute}"
        folder.mkdir(parents=True, exist_ok=True)
        task = task_of(trial, short, folder)
        result = tasks.run(
            task, lambda progress: on_progress(replace(progress, activity=f"{progress.activity}, trying {setting}"))
        )
        record = result.record
        probe = Probe(
            micro_batch=setting.micro_batch,
            recompute=setting.recompute,
            global_batch=short.global_batch or 0,
            status=result.status,
            error=result.error,
            step_seconds=record.step_seconds.median if record and record.step_seconds else None,
            peak_memory_gib=record.peak_memory_gib.max if record and record.peak_memory_gib else None,
        )
        search.heard(probe, record.device_memory_gib if record else None)
        say(f"{setting}: {_words(probe)}")
        if probe.status not in ("ok", "oom") and not search.best:
            raise NothingFitsError(f"{setting}: {probe.error}", probe.status, result.num_hosts)
    if not (best := search.best):
        last = search.probes[-1]
        tried = Setting(last.micro_batch, last.recompute)
        raise NothingFitsError(f"no setting fits: {tried}: {last.error}", last.status, result.num_hosts)
    say(f"chosen: {best}")
    return best, search.probes


def tune_launched(given: RunConfig, rendezvous: Rendezvous, device: DeviceKind) -> tuple[RunConfig, list[Probe]]:
    """`given` with nothing left to be found, for a launch whose every process calls this before it trains.

    Raises UserError, everywhere alike, where no setting can run.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    crew = Crew(launch_of(rendezvous), note_signals())
    tasks = Tasks(crew, TRAINER)
    try:
        first = legal_settings(given, rendezvous.world_size, device)[0]
        resolved = settle(given, first).resolve(rendezvous.world_size, device)
        if crew.launch.is_lead:
            trial = Trial("auto", given, resolved, {}, timeout_seconds=1800.0)
            verdict = _lead(tasks, trial)
            tasks.end(verdict)
        else:
            verdict = tasks.follow()
        crew.part()
    except StudyStopped as stopped:
        if stopped.signal:
            raise SystemExit(128 + stopped.signal) from None
        raise UserError(f"looking for {' and '.join(given.to_find)} was given up: {stopped}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if "problem" in verdict:
        raise UserError(verdict["problem"])
    return settle(given, Setting(**verdict["setting"])), [Probe(**probe) for probe in verdict["probes"]]


def _lead(tasks: Tasks, trial: Trial) -> dict[str, Any]:
    """The verdict for all processes of a launch; what is tried is told on standard output."""
    folder = Path(tempfile.mkdtemp(prefix="megabench-"))
    try:
        setting, probes = tune(tasks, trial, trial.config.out or folder, lambda line: print(line, flush=True))
    except NothingFitsError as error:
        return {"problem": str(error)}
    finally:
        shutil.rmtree(folder)
    return {"setting": asdict(setting), "probes": [probe.model_dump() for probe in probes]}


def _words(probe: Probe) -> str:
    if probe.step_seconds is None:
        return f"{probe.status}: {probe.error}"
    memory = "" if probe.peak_memory_gib is None else f", {probe.peak_memory_gib:.1f} GiB"
    return f"{probe.step_seconds:.4g} s a step of {probe.global_batch} sequences{memory}"
