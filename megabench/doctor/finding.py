"""Data types of the diagnosis: a finding, and the study records that the rules examine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megabench.record import RunRecord
from megabench.study.summary import runs_by_trial

# fails: a trial of a study that has not run will probably have no result.
# untrustworthy: a figure is wrong, or a comparison is unfair.
# preliminary: every figure is right as far as it goes, but trials, runs or steps are missing for a firm ranking.
# slow: a trial is slower than necessary.
# note: everything else that a reader of the results should know.
Kind = Literal["fails", "untrustworthy", "preliminary", "slow", "note"]
KINDS: tuple[Kind, ...] = ("fails", "untrustworthy", "preliminary", "slow", "note")  # most severe first

# A trial counts as faster than another only if its gain exceeds this fraction, because repeated runs of one trial
# differ by as much.
AS_FAST = 0.02

MOST_SHOWN = 4  # maximum number of trial names, and of different texts, shown for one finding


@dataclass(frozen=True)
class Finding:
    """A problem of some trials, or of the whole study if `trials` is empty.

    `what` describes the problem. `evidence` quotes the measured values or messages. `change` is the remedy.
    """

    kind: Kind
    trials: tuple[str, ...]
    what: str
    evidence: str
    change: str


@dataclass(frozen=True)
class Case:
    """The records of a study, in the order of its trials. Records of planned trials contain no measurements.

    `unbeaten` are the names of the trials that have not run and that are predicted to be as fast as the plan's layout.
    """

    records: tuple[RunRecord, ...]
    reference: str
    unbeaten: frozenset[str] = frozenset()

    @cached_property
    def by_trial(self) -> dict[str, list[RunRecord]]:
        """Map each trial name to the records of its runs."""
        return runs_by_trial(self.records)

    @cached_property
    def good(self) -> list[RunRecord]:
        return [record for record in self.records if record.status == "ok"]

    @cached_property
    def good_by_trial(self) -> dict[str, list[RunRecord]]:
        """Map each trial name to its runs with status "ok"; omit trials without such a run."""
        good = {trial: [run for run in runs if run.status == "ok"] for trial, runs in self.by_trial.items()}
        return {trial: runs for trial, runs in good.items() if runs}

    @cached_property
    def on_gpus(self) -> list[RunRecord]:
        """Runs with status "ok" on GPUs. Rules about speed ignore runs on CPUs."""
        return [record for record in self.good if is_on_gpu(record)]

    @property
    def beatable_on_gpus(self) -> list[RunRecord]:
        """Runs on GPUs for rules of thumb about speed, which must not contradict the planner."""
        return [record for record in self.on_gpus if record.trial not in self.unbeaten]

    @property
    def reference_runs(self) -> list[RunRecord]:
        return self.good_by_trial.get(self.reference, [])


Rule = Callable[[Case], Iterable[Finding]]


def is_on_gpu(record: RunRecord) -> bool:
    return record.device not in (None, "cpu")


def was_tuned(record: RunRecord) -> bool:
    """Return whether the micro-batch size of a run is tuned automatically (`micro_batch: auto`)."""
    return bool(record.probes) or "micro_batch" in record.auto_settings


def variants(case: Case, record: RunRecord) -> list[RunRecord]:
    """Return the records of other trials with the same engine, layout, options and optimizer.

    The trials of a sweep over micro-batches or precisions are variants of each other.
    """
    return [other for other in case.records if other.trial != record.trial and _settings(other) == _settings(record)]


def _settings(record: RunRecord) -> tuple[object, ...]:
    # a record may lack options that were added after its run, and these are off by default
    options = {name: value for name, value in record.options.items() if value}
    return record.engine, record.layout, options, record.optimizer


def is_swept(case: Case, record: RunRecord) -> bool:
    """Return whether the study measures the settings of a run with several micro-batches."""
    return any(other.micro_batch != record.micro_batch for other in variants(case, record))


def is_tried_larger(case: Case, record: RunRecord) -> bool:
    """Return whether another trial has the same settings with a larger micro-batch."""
    return any(other.micro_batch > record.micro_batch for other in variants(case, record))


def sequences_of_a_replica(record: RunRecord) -> int:
    """Return the number of sequences that one data-parallel replica processes in one step."""
    return record.global_batch // record.layout.dp


def joined(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Merge findings that report the same problem for different trials into one finding."""
    by_fault: dict[tuple[Kind, str], dict[str, Finding]] = {}
    for finding in findings:
        seen = by_fault.setdefault((finding.kind, finding.what), {})
        for trial in finding.trials or ("",):
            seen.setdefault(trial, finding)
    for (kind, what), seen in by_fault.items():
        trials = tuple(trial for trial in seen if trial)
        evidence = _together({trial: finding.evidence for trial, finding in seen.items()})
        change = _together({trial: finding.change for trial, finding in seen.items()})
        yield Finding(kind, trials, what, evidence, change)


def _together(seen: dict[str, str]) -> str:
    """Join the texts of several trials, by trial, into one. Trials with the same text share one entry."""
    trials_of: dict[str, list[str]] = {}
    for trial, text in seen.items():
        trials_of.setdefault(text, []).append(trial)
    if len(trials_of) == 1:
        return next(iter(trials_of))
    parts = [f"{names(trials)}: {text}" for text, trials in trials_of.items()]
    more = [f"and {len(parts) - MOST_SHOWN} more"] if len(parts) > MOST_SHOWN else []
    return "; ".join(parts[:MOST_SHOWN] + more)


def names(trials: Sequence[str]) -> str:
    """Join trial names with commas. Shorten a long list to its first names and a count."""
    more = f" and {len(trials) - MOST_SHOWN} more" if len(trials) > MOST_SHOWN else ""
    return ", ".join(trials[:MOST_SHOWN]) + more
