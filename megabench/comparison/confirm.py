"""Additional rounds of runs until the first place of a study is confirmed: megabench compare --confirm."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from megabench.comparison.results import Results
from megabench.record import RunRecord
from megabench.study.intervals import FEWEST_RUNS
from megabench.study.study import Attempt, Trial
from megabench.study.summary import Row, reference_name, summarize
from megabench.study.verdict import Speeds, decide, listed, speeds_by_trial

MOST_RUNS = 10  # of each trial


class Confirmation:
    """Chooses the rounds of additional runs of `trials`, and ends when the rankings are confirmed or the time is over.

    A round contains the trials of each work class whose order is not confirmed, among them the first one, and the
    reference. `outcome` says why there are no more rounds.
    """

    def __init__(self, results: Results, trials: Sequence[Trial], max_minutes: float) -> None:
        self._results, self._trials = results, {trial.name: trial for trial in trials}
        self._max_seconds = 60 * max_minutes
        self._seconds: dict[str, float] = {}
        self.outcome = ""

    @contextmanager
    def timed(self, attempt: Attempt) -> Iterator[None]:
        """Measure how long a run takes, to predict the next run of its trial."""
        # the short runs that choose a micro-batch precede only the first run of a trial
        has_short_runs = bool(attempt.trial.config.auto_settings and not self._results.found(attempt.trial))
        started = time.monotonic()
        yield
        if not has_short_runs:
            self._seconds[attempt.trial.name] = time.monotonic() - started

    def rounds(self) -> Iterator[list[Attempt]]:
        """Yield the runs of each round, after those of the round before have ended."""
        started = time.monotonic()
        while attempts := self._next_round(started):
            yield attempts

    def _next_round(self, started: float) -> list[Attempt]:
        records = [record for record in self._results.records if record.trial in self._trials]
        speeds = speeds_by_trial(records)
        rows, is_confirmed = _rows_to_run(records, self._results.study.reference, speeds)
        if self._results.not_written:
            self.outcome = "the results could not be written"
        elif not any(record.status == "ok" for record in records):
            self.outcome = "no trial has a result"
        elif not rows and is_confirmed:
            self.outcome = "the first place is confirmed"
        elif not rows:
            self.outcome = f"the trials whose order is not confirmed ran {MOST_RUNS} times"
        elif not self._fits(rows, records, started):
            self.outcome = f"the next round ({listed([row.trial for row in rows])}) does not fit into --max-minutes"
        else:
            number = 1 + max(record.repeat for record in records)
            return [Attempt(self._trials[row.trial], number) for row in rows]
        return []

    def _fits(self, rows: Sequence[Row], records: Sequence[RunRecord], started: float) -> bool:
        """Return whether a round is expected to end before the time is over."""
        expected = sum(self._seconds.get(row.trial, _recorded_seconds(row.trial, records)) for row in rows)
        return time.monotonic() - started + expected <= self._max_seconds


def _rows_to_run(records: Sequence[RunRecord], reference: str, speeds: Speeds) -> tuple[list[Row], bool]:
    """Return the trials that need another run, in the order of the study, and whether all rankings are confirmed."""
    chosen: set[str] = set()
    is_confirmed = True
    for _, group in groupby(summarize(records, reference), key=lambda row: row.work_class):
        decision = decide(list(group), speeds, reference_name(records, reference))
        needed = [*decision.undecided, *(row for row in decision.good if speeds.num_runs(row) < FEWEST_RUNS)]
        is_confirmed = is_confirmed and not needed
        runnable = {row.trial for row in needed if speeds.num_runs(row) < MOST_RUNS}
        # without another run of the first trial, or of a trial to compare it with, a round decides nothing
        if decision.others and (decision.good[0].trial not in runnable or len(runnable) < 2):
            continue
        chosen |= runnable
        named = decision.reference
        if runnable and named and speeds.num_runs(named) < MOST_RUNS:
            chosen.add(named.trial)
    rows = {row.trial: row for row in summarize(records, reference)}
    return [rows[name] for name in dict.fromkeys(record.trial for record in records) if name in chosen], is_confirmed


def _recorded_seconds(trial: str, records: Sequence[RunRecord]) -> float:
    """Return how long the newest run of a trial took, from its record; infinity if the record does not say so."""
    newest = max((record for record in records if record.trial == trial), key=lambda record: record.repeat)
    if newest.wall_seconds:
        return newest.wall_seconds
    return newest.step_seconds.median * newest.num_steps if newest.step_seconds else math.inf
