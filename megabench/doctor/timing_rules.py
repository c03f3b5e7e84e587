"""Diagnosis rules for timing: warm-up, number of timed steps, spread of the steps, and repeats.

The rules ignore runs on CPUs, whose timings say nothing about GPUs. A figure that more steps or runs would make firm is
preliminary. It is untrustworthy if it is so uncertain that any order of the trials is possible.
"""

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby

from megabench.doctor.finding import AS_FAST, Case, Finding, Kind, names
from megabench.metrics import quantile
from megabench.record import RunRecord
from megabench.study.intervals import FEWEST_RUNS
from megabench.study.summary import runs_by_trial, speeds_of, summarize
from megabench.study.verdict import Decision, decide, speeds_by_trial

# With fewer steps, p10 and p90 are close to the minimum and the maximum, and do not describe the spread.
FEWEST_STEPS = 5
ENOUGH_STEPS = 10  # recommended number of timed steps of a planned trial, summed over its repeats
# A step above this multiple of the median step time is slow: it allocates memory, connects or compiles.
SLOW_START = 1.2
# Tolerated relative uncertainty of the median, smaller than the usual difference between two layouts.
_MOST_UNCERTAIN = 0.02
# Tolerated relative difference between repeated runs, which differ in memory placement and clocks.
_MOST_APART = 0.05
# Above this multiple of a limit (an uncertainty of 10%, a difference of 25%), a figure is untrustworthy. Layouts that
# are worth comparing usually differ by less.
_FAR_APART = 5

_SIGMAS_BETWEEN_P10_AND_P90 = 2.56
_MEDIAN_TO_MEAN = 1.25  # standard error of a median divided by that of a mean, for a normal distribution
_SIGMAS_OF_95_PERCENT = 1.96


def warm_up(case: Case) -> Iterator[Finding]:
    """Report slow first steps among the timed steps, and runs without warm-up steps."""
    for record in case.on_gpus:
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
    if num_slow := _num_slow(seconds):
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


def _num_slow(seconds: Sequence[float]) -> int:
    """Count the leading steps that take at least SLOW_START times the median of the later half.

    Return 0 if a later step is as slow: then all steps vary.
    """
    if len(seconds) < 4:
        return 0
    most = SLOW_START * statistics.median(seconds[len(seconds) // 2 :])
    num_slow = next(n for n, step in enumerate(seconds) if step < most)
    return num_slow if max(seconds[num_slow:]) < most else 0


def _steps(number: int) -> str:
    return f"{number} timed step" + "s" * (number > 1)


def too_few_steps(case: Case) -> Iterator[Finding]:
    """Report trials whose timed steps are too few to determine the median step time."""
    for trial, runs in runs_by_trial(case.on_gpus).items():
        measured = [record.step_seconds.all for record in runs if record.step_seconds]
        if not measured:
            yield from _too_few_planned(trial, runs)
            continue
        num_steps = sum(map(len, measured))
        if num_steps < FEWEST_STEPS:
            yield Finding(
                "preliminary",
                (trial,),
                "too few timed steps to determine the spread of the step time",
                _steps(num_steps),
                f"set steps: {runs[0].warmup_steps + ENOUGH_STEPS} or more",
            )
            continue
        # The rule `warm_up` already reports slow first steps.
        settled = [seconds[_num_slow(seconds) :] for seconds in measured]
        uncertain, spread = max((_uncertainty(seconds), seconds) for seconds in settled)
        if uncertain > _MOST_UNCERTAIN:
            yield Finding(
                _kind(uncertain, _MOST_UNCERTAIN),
                (trial,),
                "too few timed steps for the large variation between steps",
                f"{_steps(len(spread))} took {min(spread):.3g} to {max(spread):.3g} s: the uncertainty of the "
                f"median is ±{uncertain:.1%}",
                "time more steps, on a machine without other users",
            )


def _too_few_planned(trial: str, runs: Sequence[RunRecord]) -> Iterator[Finding]:
    num_steps = sum(max(0, record.num_steps - record.warmup_steps) for record in runs)
    if num_steps < ENOUGH_STEPS:
        yield Finding(
            "preliminary" if num_steps < FEWEST_STEPS else "note",
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
    for trial, runs in runs_by_trial(case.on_gpus).items():
        speeds = speeds_of(runs)
        if len(speeds) < 2:
            continue
        apart = (max(speeds) - min(speeds)) / statistics.median(speeds)
        if apart > _MOST_APART:
            yield Finding(
                _kind(apart, _MOST_APART),
                (trial,),
                "the repeated runs of the trial disagree",
                f"{min(speeds):,.0f} to {max(speeds):,.0f} tok/s per device over {len(speeds)} runs, "
                f"a difference of {apart:.0%}",
                "check for throttled clocks and for other users of the GPUs, hosts or network; then repeat the trial",
            )


def _kind(value: float, limit: float) -> Kind:
    """Return the kind of a finding about a value above its limit."""
    return "untrustworthy" if value > _FAR_APART * limit else "preliminary"


def too_close(case: Case) -> Iterator[Finding]:
    """Report trials that may be as fast as the best trial; a repeated run may change their order.

    The finding is a note if each of the trials ran FEWEST_RUNS times or more: then equal speeds are the result.
    """
    for decision in _decisions(case):
        if decision.best and decision.equals:
            first, near = decision.best, [row.trial for row in decision.equals]
            is_firm = min(row.num_runs for row in (first, *decision.equals)) >= FEWEST_RUNS
            yield Finding(
                "note" if is_firm else "preliminary",
                (first.trial, *near),
                "the speeds of the trials are too close to determine which trial is fastest",
                f"{first.trial} {first.tokens_per_second_per_device:,.0f} tok/s per device, {names(near)}: equal "
                f"within {decision.equal_within}",
                f"repeat the trials with compare --confirm or repeats: {FEWEST_RUNS}, or choose the simpler "
                f"configuration",
            )


def one_run(case: Case) -> Iterator[Finding]:
    """Report a comparison on GPUs in which every trial ran only once.

    The finding is preliminary if the fastest trial leads by less than repeated runs differ. Otherwise it is a note,
    because repeats would hardly change which trial is fastest.
    """
    is_once = len(case.good_by_trial) > 1 and case.on_gpus and all(len(runs) == 1 for runs in case.by_trial.values())
    if not is_once:
        return
    close = [line for decision in _decisions(case) if (line := _small_lead(decision))]
    lead = f", and the fastest trial leads by less than {AS_FAST:.0%}" if close else ""
    yield Finding(
        "preliminary" if close else "note",
        (),
        f"each trial ran only once, so the variation between runs is unknown{lead}",
        "; ".join([f"{len(case.by_trial)} trials, one run each", *close]),
        f"repeat the best trials with compare --confirm, or set repeats: {FEWEST_RUNS} for the whole study",
    )


def _small_lead(decision: Decision) -> str | None:
    """Describe a lead below AS_FAST of the best trial over the next one on as many GPUs.

    The rule `too_close` already reports trials that may be as fast as the best trial.
    """
    best = decision.best
    others = [row for row in decision.good[1:] if best and row.world_size == best.world_size]
    second = next((row for row in others if row not in decision.equals), None)
    if best is None or second is None:
        return None
    assert best.tokens_per_second_per_device and second.tokens_per_second_per_device
    lead = best.tokens_per_second_per_device / second.tokens_per_second_per_device - 1
    return f"{best.trial} is {lead:.1%} faster than {second.trial}" if lead < AS_FAST else None


def _decisions(case: Case) -> Iterator[Decision]:
    """Return the conclusion about the GPU trials of each work class."""
    speeds = speeds_by_trial(case.on_gpus)
    for _, group in groupby(summarize(case.on_gpus, case.reference), key=lambda row: row.work_class):
        yield decide(list(group), speeds, case.reference)
