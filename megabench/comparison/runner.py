"""Run a study with one supervisor for all ranks of this machine, or with one supervisor per rank under torchrun."""

import signal
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

from rich.console import Console

from megabench.autotune.tune import NothingFitsError, tune
from megabench.comparison.confirm import Confirmation
from megabench.comparison.results import Results, failed_record
from megabench.config.auto import apply_setting
from megabench.doctor.write_findings import write_head
from megabench.errors import UserError
from megabench.record import RunFailure, RunRecord
from megabench.runtime.emulated_network import EmulatedNetworkError
from megabench.runtime.process import collect_garbage
from megabench.runtime.run_lock import RunLockedError
from megabench.specs.registry import PROGRAMS
from megabench.study.compare_request import Request
from megabench.study.locate import located
from megabench.study.planned_trials import regret_sentence
from megabench.study.study import Attempt, Study
from megabench.study.table import show
from megabench.supervisor.coordinator import Coordinator, StudyStopped, note_signals
from megabench.supervisor.launch import join_launcher, open_here
from megabench.supervisor.root_cause import Verdict
from megabench.supervisor.trial_queue import TRAINER, TrialQueue, task_of
from megabench.terminal import ProgressLine, standard_output


def run_here(request: Request, study: Study, num_processes: int, trainer: Sequence[str] = TRAINER) -> int:
    """Run a study on this machine. Return the exit status: 0 if every trial is ok, else 1.

    `trainer` is the training command, which receives the flags of a RunConfig. Raises StudyError before any process
    starts.
    """
    results = Results.open(request.out, study)
    attempts = results.choose(request.resume, request.only)
    coordinator = Coordinator(open_here(num_processes), note_signals())
    return _to_the_end(coordinator, lambda: _lead(coordinator, request, results, attempts, trainer))


def run_launched(request: Request, trainer: Sequence[str] = TRAINER) -> int:
    """Run a study as one of the processes of torchrun. Each process supervises its own rank.

    Return the same exit status on all processes: that of `run_here`, or 2 if the study cannot be run.
    """
    coordinator = Coordinator(join_launcher(request.out), note_signals())
    try:
        return _to_the_end(coordinator, lambda: _join_study(coordinator, request, trainer))
    finally:
        # After the first process exits, torchrun sends SIGTERM to the others, which must keep their own exit status.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _to_the_end(coordinator: Coordinator, run: Callable[[], int]) -> int:
    """Return the exit status of `run`, also if the study stops early."""
    collect_garbage()
    try:
        return coordinator.to_the_end(run)
    except StudyStopped as stopped:
        if coordinator.launch.is_lead or not stopped.signal:
            print(f"Stopped: {stopped}. Run the same command with --resume to continue.", file=sys.stderr, flush=True)
        return 128 + stopped.signal if stopped.signal else 1


def _join_study(coordinator: Coordinator, request: Request, trainer: Sequence[str]) -> int:
    """Read the study on every supervisor. Runs start after all supervisors have read the same study."""
    study: Study | None = None
    try:
        study = request.plan_launched(len(coordinator.launch.supervisors))
        coordinator.report({"digest": study.digest})
    except UserError as error:
        coordinator.report({"problem": str(error)})
    if coordinator.launch.is_lead:
        return _lead_launched(coordinator, request, study, trainer)
    plan = coordinator.announced("plan")
    if "problem" in plan:
        return 2
    assert study is not None
    verdict: int = TrialQueue(coordinator, trainer).follow()
    return verdict


def _lead_launched(coordinator: Coordinator, request: Request, study: Study | None, trainer: Sequence[str]) -> int:
    try:
        _check_reports(coordinator.reports())
        assert study is not None
        results = Results.open(request.out, study)
        attempts = results.choose(request.resume, request.only)
    except UserError as error:
        # Print the error before any supervisor exits, because torchrun then ends all other supervisors.
        print(f"Error: {error}", file=sys.stderr, flush=True)
        coordinator.announce("plan", {"problem": str(error)})
        return 2
    coordinator.announce("plan", {})
    return _lead(coordinator, request, results, attempts, trainer)


def _check_reports(reports: Sequence[dict[str, Any]]) -> None:
    """Raise UserError unless all supervisors have read the same valid study."""
    first = reports[0]
    for report in reports:
        if "problem" in report:
            elsewhere = f" (on {report['host']})" if report["host"] != first["host"] else ""
            raise UserError(report["problem"] + elsewhere)
    for report in reports:
        if report["digest"] != first["digest"]:
            raise UserError(
                f"the study differs between {first['host']} and {report['host']}; use the same file and the same "
                f"--set options on every host"
            )


def _lead(
    coordinator: Coordinator, request: Request, results: Results, attempts: Sequence[Attempt], trainer: Sequence[str]
) -> int:
    """Run all attempts, write their records, print the table and announce the verdict to the other supervisors.

    The verdict is 2 if another process has taken over the output directory.
    """
    queue = TrialQueue(coordinator, trainer)
    try:
        status = _run_all(queue, request, results, attempts)
    except RunLockedError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        status = 2
    queue.end(status)
    return status


class RunDisplay(ProgressLine):
    """Shows the progress of one run. A file or pipe also receives a line at the start, and every output one at the end.

    The number of the run and its name start each line.
    """

    def __init__(self, console: Console, number: int, num_runs: int, name: str) -> None:
        super().__init__(console, f"[{number}/{num_runs}] {name}")

    def __enter__(self) -> Self:
        if not self._is_live:
            self.say("…")
        return super().__enter__()

    def end(self, record: RunRecord) -> None:
        """Print the status of a finished run."""
        self.stop()
        speed = record.tokens_per_second_per_device
        if record.status == "ok" and speed is not None:
            self.say(f"ok: {speed:,.0f} tokens/s per device ({self.elapsed})")
        elif record.status == "diverged":
            self.say(f"DIVERGED: {record.error} ({self.elapsed})")
        else:
            self.say(record.status + (f": {record.error}" if record.error else "") + f" ({self.elapsed})")


def _run_all(queue: TrialQueue, request: Request, results: Results, attempts: Sequence[Attempt]) -> int:
    console = standard_output()
    if said := results.start():
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    _run_rounds(queue, request, results, attempts, console)
    if results.not_written:
        results.write()
    if results.not_written:
        print(f"Error: {results.not_written}; free space, then use --resume", file=sys.stderr, flush=True)
        return 1
    if results.study.question:
        console.print(results.study.question, markup=False, highlight=False, soft_wrap=True)
    records, reference = results.records, results.study.reference
    show(console, records, reference, results.study.answers, confirm=results.how_to_confirm)
    if request.locate:
        console.print(located(records), markup=False, highlight=False, soft_wrap=True)
    write_head(console, records, reference, results.out)
    if sentence := regret_sentence(records):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(f"records: {results.out / 'results.jsonl'}", markup=False, highlight=False, soft_wrap=True)
    if records:
        # importing torch takes seconds, so it is done only at the end of a study
        from megabench.comparison.hparams import write_hparams

        write_hparams(results.out / "tensorboard", results.by_folder)
        console.print(f"report: {results.write_report()}", markup=False, highlight=False, soft_wrap=True)
    results.close()
    return 0 if results.all_ok(results.select(request.only)) else 1


def _run_rounds(
    queue: TrialQueue, request: Request, results: Results, attempts: Sequence[Attempt], console: Console
) -> None:
    """Run all attempts, and with --confirm the rounds that follow."""
    confirmation = Confirmation(results, results.study.select(request.only), request.minutes_to_confirm)
    num_done = 0
    for runs in chain([attempts], confirmation.rounds() if request.confirm else ()):
        num_runs = num_done + len(runs)
        for attempt in runs:
            num_done += 1
            name = attempt.folder.as_posix()
            with RunDisplay(console, num_done, num_runs, name) as display, confirmation.timed(attempt):
                _run_attempt(queue, results, attempt, display)
    if request.confirm:
        console.print(f"--confirm ended: {confirmation.outcome}", markup=False, highlight=False, soft_wrap=True)


def _run_attempt(queue: TrialQueue, results: Results, attempt: Attempt, display: RunDisplay) -> None:
    """Run one attempt and add its record: the record of rank 0, or the reason why there is none."""
    trial, logs = attempt.trial, results.logs(attempt)
    found, probes = None, None
    try:
        results.clear(attempt)
        if trial.config.auto_settings:
            found, probes = results.found(trial) or tune(queue, trial, logs, display)
            display.update("starting")
        config = apply_setting(trial.config, found) if found else trial.config
        output = {"tensorboard": results.tensorboard(attempt), "sketches": results.sketches(attempt)}
        if trial.resolved.why_no_sketches:
            del output["sketches"]
        if trial.resolved.engine in PROGRAMS:
            output["initial_models"] = results.initial_models
        task = task_of(trial, config.model_copy(update=output), logs)
        result = queue.run(task, display.update)
        if result.record:
            # remove the output directories of this study from the command
            command = config.command(trial.world_size, trial.env)
            record = result.record.model_copy(update={"probes": probes, "command": command})
        else:
            record = failed_record(trial, result.verdict, result.num_hosts, found, probes)
        if network := result.network:
            record = record.model_copy(
                update={"emulated_network": network, "warnings": [*record.warnings, *network.warnings]}
            )
            for line in (network.sentence, *(f"WARNING: {warning}" for warning in network.warnings)):
                display.say(line)
    except (OSError, EmulatedNetworkError) as error:
        record = failed_record(trial, Verdict("failed", str(error), RunFailure(kind="error")), None, found, probes)
    except NothingFitsError as error:
        record = failed_record(trial, error.verdict, error.num_hosts, probes=error.probes)
    except StudyStopped as stopped:
        if not stopped.signal:  # a rank of this run may have ended the coordinator
            lost = Verdict("failed", str(stopped), RunFailure(kind="error", rank=stopped.rank))
            record = failed_record(trial, lost, None, found, probes)
            display.end(results.add(attempt, record))
        raise
    display.end(results.add(attempt, record))
