"""Find the values of "auto" settings by short runs, each in fresh processes.

A short run that runs out of memory therefore cannot affect later runs.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megabench import UserError
from megabench.autotune.probe import probe_config, probe_result
from megabench.autotune.setting_search import Search
from megabench.config.auto import Setting, legal_settings
from megabench.record import Probe
from megabench.runtime.messages import Progress
from megabench.study.study import Trial
from megabench.supervisor.root_cause import Verdict
from megabench.supervisor.trial_queue import Result, TrialQueue, task_of


class NothingFitsError(UserError):
    """Raised if no setting could run. `verdict` has the status and the cause of the last short run in `probes`."""

    def __init__(self, sentence: str, probes: list[Probe], last: Result) -> None:
        super().__init__(sentence)
        self.probes, self.num_hosts = probes, last.num_hosts
        self.verdict = Verdict(probes[-1].status, sentence, last.verdict.failure)


def tune(
    queue: TrialQueue,
    trial: Trial,
    logs: Path,
    say: Callable[[str], None],
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Setting, list[Probe]]:
    """Return the fastest setting that fits for the "auto" settings of `trial`, and the results of all short runs.

    For the lead alone.

    Each short run logs to its own directory in `logs`. Raises NothingFitsError if no setting could run, or if a short
    run failed for another reason than memory before any succeeded.
    """
    config, run = trial.config, trial.resolved
    search = Search(legal_settings(config, run.world_size, run.device), run)
    while setting := search.next():
        short = probe_config(config, setting, run.world_size, run.device)
        folder = logs / "probes" / f"micro-batch{setting.micro_batch}-{setting.recompute}"
        # an earlier run that was killed during the search has left this directory
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        task = task_of(trial, short, folder)
        result = queue.run(
            task, lambda progress: on_progress(replace(progress, activity=f"{progress.activity}, trying {setting}"))
        )
        probe = probe_result(setting, short, result.verdict.status, result.verdict.error, result.record)
        search.tell(probe, result.record.device_memory_gib if result.record else None)
        say(f"{setting}: {_words(probe)}")
        if probe.status not in ("ok", "oom") and not search.best:
            raise NothingFitsError(f"{setting}: {probe.error}", search.probes, result)
    if not (best := search.best):
        last = search.probes[-1]
        tried = Setting(last.micro_batch, last.recompute)
        raise NothingFitsError(f"no setting fits into memory; tried {tried}: {last.error}", search.probes, result)
    say(f"chosen: {best}")
    return best, search.probes


def _words(probe: Probe) -> str:
    if probe.step_seconds is None:
        return f"{probe.status}: {probe.error}"
    memory = "" if probe.peak_memory_gib is None else f", {probe.peak_memory_gib:.1f} GiB"
    return f"{probe.step_seconds:.4g} s a step of {probe.global_batch} sequences{memory}"
