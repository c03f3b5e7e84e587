"""Diagnosis rules for timing: warm-up, number of timed steps, spread of the steps, and repeats."""

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby

from megabench.doctor.finding import Case, Finding, is_on_gpu, names
from megabench.metrics import quantile
from megabench.record import RunRecord
from megabench.study.summary import speeds_of, summarize
from megabench.study.verdict import decide, spreads_of

# With fewer steps, p10 and p90 are close to the minimum and the maximum, and do not describe the spread.
FEWEST_STEPS = 5
ENOUGH_STEPS = 10  # recommended number of timed steps of a planned trial, summed over its repeats
# A step above this multiple of the median step time is slow: it allocates memory, connects or compiles.
SLOW_START = {"gpu": 1.2, "cpu": 2.0}
# Tolerated relative uncertainty of the median, smaller than the usual difference between two layouts.
_MOST_UNCERTAIN = {"gpu": 0.02, "cpu": 0.1}
# Tolerated relative difference between repeated runs, which differ in memory placement and clocks.
_MOST_APART = {"gpu": 0.05, "cpu": 0.25}

_SIGMAS_BETWEEN_P10_AND_P90 = 2.56
_MEDIAN_TO_MEAN = 1.25  # standard error of a median divided by that of a mean, for a normal distribution
_SIGMAS_OF_95_PERCENT = 1.96


def warm_up(case: Case) -> Iterator[Finding]:
    """Report slow first steps among the timed steps, and runs without warm-up steps."""
    for record in case.good:
        if record.step_seconds:
            yield from _slow_start(record, record.step_seconds.all)
        elif record.warmup_steps == 0:
            yield Finding(
                "untrustworthy",
                (record.trial,),
                "no warm-up: the timing would include the first step, which compiles kernels and sets up connections",
                "warmup_steps: 0",
                "set warmup_steps: 5",
            )


def _slow_start(record: RunRecord, seconds: Sequence[float]) -> Iterator[Finding]:
    if num_slow := _num_slow(seconds, SLOW_START[_where(record)]):
        usual = statistics.median(seconds[len(seconds) // 2 :])
        compiled = ", compile: true" if record.options.get("compile") else ""
        yield Finding(
            "untrustworthy",
            (record.trial,),
            "the timed steps include warm-up or compilation",
            f"the first {_steps(num_slow)} took up to {max(seconds[:num_slow]):.3g} s, the median of the later half is "
            f"{usual:.3g} s (warmup_steps: {record.warmup_steps}{compiled})",
            "use a larger warmup_steps, so that the timing includes no slow step",
        )


def _num_slow(seconds: Sequence[float], slow: float) -> int:
    """Count the leading steps that take at least `slow` times the median of the later half.

    Return 0 if a step in the later half is as slow.
    """
    if len(seconds) < 4:
        return 0
    later = seconds[len(seconds) // 2 :]
    most = slow * statistics.median(later)
    return next(n for n, step in enumerate(seconds) if step < most) if max(later) < most else 0


def _steps(number: int) -> str:
    return f"{number} timed step" + "s" * (number > 1)


def too_few_steps(case: Case) -> Iterator[Finding]:
    """Report trials whose timed steps are too few to determine the median step time."""
    for trial, runs in case.good_by_trial.items():
        measured = [record.step_seconds.all for record in runs if record.step_seconds]
        if not measured:
            yield from _too_few_planned(trial, runs)
            continue
        num_steps = sum(map(len, measured))
        if num_steps < FEWEST_STEPS:
            if is_on_gpu(runs[0]):
                yield Finding(
                    "untrustworthy",
                    (trial,),
                    "too few timed steps to determine the spread of the step time",
                    _steps(num_steps),
                    f"set steps: {runs[0].warmup_steps + ENOUGH_STEPS} or more",
                )
            continue
        settled = [
            seconds[_num_slow(seconds, SLOW_START[_where(runs[0])]) :] for seconds in measured
        ]  # the rule `warm_up` already reports slow first steps
        uncertain, spread = max((_uncertainty(seconds), seconds) for seconds in settled)
        if uncertain > _MOST_UNCERTAIN[_where(runs[0])]:
            yield Finding(
                "untrustworthy",
                (trial,),
                "too few timed steps for the large variation between steps",
                f"{_steps(len(spread))} took {min(spread):.3g} to {max(spread):.3g} s: the uncertainty of the "
                f"median is ±{uncertain:.0%}",
                "time more steps, on a machine without other users",
            )


def _too_few_planned(trial: str, runs: Sequence[RunRecord]) -> Iterator[Finding]:
    num_steps = sum(max(0, record.num_steps - record.warmup_steps) for record in runs)
    if num_steps < ENOUGH_STEPS and is_on_gpu(runs[0]):
        yield Finding(
            "untrustworthy" if num_steps < FEWEST_STEPS else "note",
            (trial,),
            "too few planned timed steps to determine the spread of the step time",
            f"the trial will time {_steps(num_steps)} (steps: {runs[0].num_steps}, warmup_steps: "
            f"{runs[0].warmup_steps})",
            f"set steps: {runs[0].warmup_steps + ENOUGH_STEPS} or more",
        )


def _uncertainty(seconds: Sequence[float]) -> float:
    """Return the half-width of the 95% confidence interval of the median step time, divided by the median."""
    if len(seconds) < 2:
        return 0.0
    sigma = (quantile(seconds, 0.9) - quantile(seconds, 0.1)) / _SIGMAS_BETWEEN_P10_AND_P90
    error = _SIGMAS_OF_95_PERCENT * _MEDIAN_TO_MEAN * sigma / len(seconds) ** 0.5
    return error / statistics.median(seconds)


def repeats(case: Case) -> Iterator[Finding]:
    """Report trials whose repeated runs differ too much in speed."""
    for trial, runs in case.good_by_trial.items():
        speeds = speeds_of(runs)
        if len(speeds) < 2:
            continue
        apart = (max(speeds) - min(speeds)) / statistics.median(speeds)
        if apart > _MOST_APART[_where(runs[0])]:
            yield Finding(
                "untrustworthy",
                (trial,),
                "the repeated runs of the trial disagree",
                f"{min(speeds):,.0f} to {max(speeds):,.0f} tok/s per device over {len(speeds)} runs, "
                f"a difference of {apart:.0%}",
                "check for throttled clocks and for other users of the GPUs, hosts or network; then repeat the trial",
            )


def too_close(case: Case) -> Iterator[Finding]:
    """Report trials that are equal to the best trial within the spread; a repeated run may change their order."""
    rows, spreads = summarize(case.records, case.reference), spreads_of(case.records)
    for _, group in groupby(rows, key=lambda row: row.work_class):
        decision = decide(list(group), spreads, case.reference)
        if decision.best and decision.equals:
            first, near = decision.best, [row.trial for row in decision.equals]
            spread = f"their spreads overlap that of {first.trial}" if len(near) > 1 else "the spreads overlap"
            yield Finding(
                "note",
                (first.trial, *near),
                "the speeds of the trials are too close to determine which trial is fastest",
                f"{first.trial} {first.tokens_per_second_per_device:,.0f} tok/s per device, {names(near)}: {spread}",
                "set repeats: 3 or more, or choose the simpler configuration",
            )


def one_run(case: Case) -> Iterator[Finding]:
    """Report a comparison on GPUs in which every trial ran only once."""
    if len(case.good_by_trial) > 1 and case.on_gpus and all(len(runs) == 1 for runs in case.by_trial.values()):
        yield Finding(
            "note",
            (),
            "each trial ran only once, so the variation between runs is unknown",
            f"{len(case.by_trial)} trials, one run each",
            "set repeats: 3 for the whole study or for its best trials",
        )


def _where(record: RunRecord) -> str:
    return "gpu" if is_on_gpu(record) else "cpu"
