"""Find the values of "auto" settings by short runs, each in fresh processes.

A short run that runs out of memory therefore cannot affect later runs.
"""

import shutil
from pathlib import Path

from megabench.autotune.probe import probe_config, probe_result
from megabench.autotune.setting_search import Search
from megabench.config.auto import AutoSetting, legal_settings
from megabench.errors import UserError
from megabench.record import Probe
from megabench.study.study import Trial
from megabench.supervisor.root_cause import Verdict
from megabench.supervisor.trial_queue import Result, TrialQueue, task_of
from megabench.terminal import ProgressLine


class NothingFitsError(UserError):
    """Raised if no setting could run. `probes` has all short runs, and `verdict` is the failure of the last one."""

    def __init__(self, sentence: str, probes: list[Probe], last: Result) -> None:
        super().__init__(sentence)
        self.probes, self.num_hosts = probes, last.num_hosts
        self.verdict = Verdict(probes[-1].status, sentence, last.verdict.failure)


def tune(queue: TrialQueue, trial: Trial, logs: Path, display: ProgressLine) -> tuple[AutoSetting, list[Probe]]:
    """Return the fastest setting that fits for the "auto" settings of `trial`, and the results of all short runs.

    For the lead alone. `display` shows the current short run, and keeps a line for each result.

    Each short run logs to its own directory in `logs`. Raises NothingFitsError if no setting could run, or if a short
    run failed for another reason than memory before any succeeded.
    """
    config, run = trial.config, trial.resolved
    search = Search(legal_settings(config, run.world_size, run.device), run)
    while setting := search.next():
        short = probe_config(config, setting, run.world_size, run.device)
        folder = logs / "probes" / f"micro-batch{setting.micro_batch}-{setting.recompute}"
        # the directory exists if an earlier run was killed during the search
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        label = f"auto-tuning, short run {len(search.probes) + 1} of at most {search.most_probes}, trying {setting}"

        def show(activity: object, label: str = label) -> None:
            display.update(f"{label}: {activity}")

        show("starting")
        result = queue.run(task_of(trial, short, folder), show)
        probe = probe_result(setting, short, result.verdict.status, result.verdict.error, result.record)
        search.tell(probe, result.record.device_memory_gib if result.record else None)
        display.say(f"{setting}: {_words(probe)}")
        if probe.status not in ("ok", "oom") and not search.best:
            raise NothingFitsError(f"{setting}: {probe.error}", search.probes, result)
    if not (best := search.best):
        last = search.probes[-1]
        tried = AutoSetting(last.micro_batch, last.recompute)
        raise NothingFitsError(f"no setting fits into memory; tried {tried}: {last.error}", search.probes, result)
    display.say(f"chosen: {best}")
    return best, search.probes


def _words(probe: Probe) -> str:
    if probe.step_seconds is None:
        return f"{probe.status}: {probe.error}"
    memory = "" if probe.peak_memory_gib is None else f", {probe.peak_memory_gib:.1f} GiB"
    return f"{probe.step_seconds:.4g} s a step of {probe.global_batch} sequences{memory}"
