"""A finding, and the case that the rules look at."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megabench.record import RunRecord
from megabench.study.summary import runs_by_trial

Kind = Literal["untrustworthy", "slow", "note"]
KINDS: tuple[Kind, ...] = ("untrustworthy", "slow", "note")  # worst first

_MOST_SHOWN = 4  # trials whose evidence differs


@dataclass(frozen=True)
class Finding:
    """A fault of some trials, or of the whole study where `trials` is empty.

    `what` names the fault, `evidence` has the figures or words that were seen, `change` says what to do.
    """

    kind: Kind
    trials: tuple[str, ...]
    what: str
    evidence: str
    change: str


@dataclass(frozen=True)
class Case:
    """The records of a study, in its order. A trial that is only planned has records in which nothing is measured."""

    records: tuple[RunRecord, ...]
    reference: str

    @cached_property
    def by_trial(self) -> dict[str, list[RunRecord]]:
        """The runs of each trial."""
        return runs_by_trial(self.records)

    @cached_property
    def good(self) -> list[RunRecord]:
        return [record for record in self.records if record.status == "ok"]

    @cached_property
    def good_by_trial(self) -> dict[str, list[RunRecord]]:
        """The good runs of each trial that has any."""
        good = {trial: [run for run in runs if run.status == "ok"] for trial, runs in self.by_trial.items()}
        return {trial: runs for trial, runs in good.items() if runs}

    @cached_property
    def on_gpus(self) -> list[RunRecord]:
        """The good runs on GPUs: what is slow on a CPU is no fault."""
        return [record for record in self.good if is_on_gpu(record)]

    @property
    def reference_runs(self) -> list[RunRecord]:
        return self.good_by_trial.get(self.reference, [])


Rule = Callable[[Case], Iterable[Finding]]


def is_on_gpu(record: RunRecord) -> bool:
    return record.device not in (None, "cpu")


def was_tuned(record: RunRecord) -> bool:
    """Whether its micro-batch was, or will be, found by trying."""
    return bool(record.probes) or "micro_batch" in (record.auto_settings or ())


def is_tried_larger(case: Case, record: RunRecord) -> bool:
    """Whether another trial is the same with a larger micro-batch."""
    return any(
        other.micro_batch > record.micro_batch
        and (other.engine, other.layout, other.options) == (record.engine, record.layout, record.options)
        for other in case.records
        if is_on_gpu(other)
    )


def sequences_of_a_replica(record: RunRecord) -> int:
    """Of one step."""
    return record.global_batch // record.layout.dp


def joined(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The same findings with one for each fault, of all trials that have it."""
    by_fault: dict[tuple[Kind, str, str], dict[str, str]] = {}
    for finding in findings:
        seen = by_fault.setdefault((finding.kind, finding.what, finding.change), {})
        for trial in finding.trials or ("",):
            seen.setdefault(trial, finding.evidence)
    for (kind, what, change), seen in by_fault.items():
        trials = tuple(trial for trial in seen if trial)
        yield Finding(kind, trials, what, _together(seen), change)


def _together(seen: dict[str, str]) -> str:
    """The evidence of all trials, each text once."""
    trials_of: dict[str, list[str]] = {}
    for trial, text in seen.items():
        trials_of.setdefault(text, []).append(trial)
    if len(trials_of) == 1:
        return next(iter(trials_of))
    parts = [f"{names(trials)}: {text}" for text, trials in trials_of.items()]
    more = [f"and {len(parts) - _MOST_SHOWN} more"] if len(parts) > _MOST_SHOWN else []
    return "; ".join(parts[:_MOST_SHOWN] + more)


def names(trials: Sequence[str]) -> str:
    """The trials in a line, the first ones where they are many."""
    more = f" and {len(trials) - _MOST_SHOWN} more" if len(trials) > _MOST_SHOWN else ""
    return ", ".join(trials[:_MOST_SHOWN]) + more
