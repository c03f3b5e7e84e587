"""Find the values of "auto" settings in a launched run, whose processes first supervise the short runs."""

import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from megabench.atomic_write import write_atomically
from megabench.autotune.probe import probe_config
from megabench.autotune.tune import NothingFitsError, tune
from megabench.config import RunConfig
from megabench.config.auto import AutoSetting, apply_setting, resolve_first
from megabench.config.record_fields import identity
from megabench.errors import UserError
from megabench.hardware.facts import gpu_names
from megabench.inputs import read_text
from megabench.record import Probe
from megabench.runtime.device import DeviceKind
from megabench.runtime.rendezvous import Rendezvous, restart_count
from megabench.study.study import Trial
from megabench.supervisor.coordinator import Coordinator, StudyStopped, note_signals, signal_handlers_kept
from megabench.supervisor.launch import launch_of
from megabench.supervisor.trial_queue import TRAINER, TrialQueue
from megabench.terminal import ProgressLine, standard_output
from megabench.train.stopping import SignalledError, StoppedError

FOUND_NAME = "found.json"

# Processes of a trial do not inherit this variable, because each layout sets its own value.
_OWN_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS",)


class FoundSettings(BaseModel):
    """The settings that an earlier start of this run found, stored in its --save or --out directory."""

    model_config = ConfigDict(extra="forbid")

    identity: str  # of the probes
    micro_batch: int
    recompute: str
    probes: list[Probe]

    @property
    def setting(self) -> AutoSetting:
        return AutoSetting(self.micro_batch, self.recompute)

    @property
    def verdict(self) -> dict[str, Any]:
        return {"setting": asdict(self.setting), "probes": [probe.model_dump() for probe in self.probes]}


def tune_launched(given: RunConfig, rendezvous: Rendezvous, device: DeviceKind) -> tuple[RunConfig, list[Probe]]:
    """Return `given` with values for its "auto" settings. Every process of the launch must call this before it trains.

    A run that is restarted or resumed uses the settings that it found before. Raises UserError on all processes if no
    setting can run, StoppedError if the search cannot continue, and SignalledError if a signal ended it.
    """
    with signal_handlers_kept():
        received = note_signals()
        try:
            coordinator = Coordinator(launch_of(rendezvous), received)
            verdict = coordinator.to_the_end(lambda: _join(coordinator, given, rendezvous, device))
        except StudyStopped as stopped:
            if not received:
                raise StoppedError(f"the search for {' and '.join(given.auto_settings)} stopped: {stopped}") from None
    if received:  # even if the signal arrived after the coordinator had last asked for signals
        raise SignalledError(received[0])
    if "problem" in verdict:
        raise UserError(verdict["problem"])
    return apply_setting(given, AutoSetting(**verdict["setting"])), [Probe(**probe) for probe in verdict["probes"]]


def _join(coordinator: Coordinator, given: RunConfig, rendezvous: Rendezvous, device: DeviceKind) -> dict[str, Any]:
    """Take part in the search, and return the verdict of the lead process."""
    run = resolve_first(given, rendezvous.world_size, device)
    own = {name: os.environ[name] for name in _OWN_VARIABLES if name in os.environ}
    trial = Trial("auto", given, run, own, timeout_seconds=1800.0)
    queue = TrialQueue(coordinator, TRAINER)
    coordinator.report({})
    if coordinator.launch.is_lead:
        coordinator.reports()
        coordinator.announce("plan", {"logs": str(given.out or tempfile.mkdtemp(prefix="megabench-"))})
    logs = Path(coordinator.announced("plan")["logs"])
    try:
        if coordinator.launch.is_lead:
            queue.end(_lead(queue, trial, logs))
        verdict: dict[str, Any] = queue.follow()
        return verdict
    finally:
        if not given.out:
            # every host deletes the logs of its own processes
            shutil.rmtree(logs, ignore_errors=True)


def _lead(queue: TrialQueue, trial: Trial, logs: Path) -> dict[str, Any]:
    """Run the search and return its verdict for all processes. Short runs are reported on standard output."""
    config, identity = trial.config, _identity(trial)
    own = config.save or config.out
    folders = [folder for folder in (own, config.load) if folder] if restart_count() or config.load else []
    for path in (folder / FOUND_NAME for folder in folders):
        if (before := _read(path)) and before.identity == identity:
            _say(f"chosen before: {before.setting} ({path})")
            return before.verdict
    try:
        with ProgressLine(standard_output()) as display:
            setting, probes = tune(queue, trial, logs, display)
    except NothingFitsError as error:
        return {"problem": str(error)}
    found = FoundSettings(
        identity=identity, micro_batch=setting.micro_batch, recompute=setting.recompute, probes=probes
    )
    if own:
        try:
            write_atomically(own / FOUND_NAME, found.model_dump_json(indent=2) + "\n")
        except OSError as error:
            _say(f"{own / FOUND_NAME} could not be written ({error.strerror}): a resumed run will search again")
    return found.verdict


def _identity(trial: Trial) -> str:
    """Return a hash of all settings that affect the results of the short runs. Equal hashes mean equal results."""
    config, run = trial.config, trial.resolved
    first = AutoSetting(run.micro_batch, run.recompute)
    short = probe_config(config, first, run.world_size, run.device)
    return identity(
        short, world_size=run.world_size, auto_settings=config.auto_settings, env=trial.env, gpus=gpu_names()
    )


def _read(path: Path) -> FoundSettings | None:
    """Return the settings stored in `path`, or None if they cannot be used."""
    try:
        return FoundSettings.model_validate_json(read_text(path))
    except (OSError, ValueError):
        return None


def _say(line: str) -> None:
    print(line, flush=True)
