"""Whether the timed steps can carry what is said about them."""

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby

from megabench.doctor.finding import Case, Finding, is_on_gpu, names
from megabench.metrics import quantile
from megabench.record import RunRecord
from megabench.study.summary import speeds_of, summarize
from megabench.study.verdict import decide, spreads_of

# below that p10 and p90 are the two ends, and say nothing of a spread
FEWEST_STEPS = 5
ENOUGH_STEPS = 10  # what a study that is not run yet should time, repeats together
# a warm-up step that allocates, connects or compiles takes far longer than the jitter of a good one
SLOW_START = {"gpu": 1.2, "cpu": 2.0}
# what two layouts often differ by, so a median should be known better: GPUs of one run agree to a percent
_MOST_UNCERTAIN = {"gpu": 0.02, "cpu": 0.1}
# a second run of the same processes and GPUs, other placement of memory and clocks included
_MOST_APART = {"gpu": 0.05, "cpu": 0.25}

_SIGMAS_BETWEEN_P10_AND_P90 = 2.56
_MEDIAN_TO_MEAN = 1.25  # the standard error of a median over that of a mean, for a normal distribution
_SIGMAS_OF_95_PERCENT = 1.96


def warm_up(case: Case) -> Iterator[Finding]:
    """Slow first steps among the timed ones, and runs that have no warm-up at all."""
    for record in case.good:
        if record.step_seconds:
            yield from _slow_start(record, record.step_seconds.all)
        elif record.warmup_steps == 0:
            yield Finding(
                "untrustworthy",
                (record.trial,),
                "has no warm-up: its first step, which compiles and connects, would be timed",
                "warmup_steps: 0",
                "warmup_steps: 5",
            )


def _slow_start(record: RunRecord, seconds: Sequence[float]) -> Iterator[Finding]:
    if num_slow := _num_slow(seconds, SLOW_START[_where(record)]):
        usual = statistics.median(seconds[len(seconds) // 2 :])
        compiled = ", compile: true" if record.options.get("compile") else ""
        yield Finding(
            "untrustworthy",
            (record.trial,),
            "has warm-up or compilation inside its timing",
            f"its first {_steps(num_slow)} took up to {max(seconds[:num_slow]):.3g} s, the later half {usual:.3g} s "
            f"(warmup_steps: {record.warmup_steps}{compiled})",
            "a larger warmup_steps, so that no slow step is timed",
        )


def _num_slow(seconds: Sequence[float], slow: float) -> int:
    """How many steps at the start take `slow` times as long as the later half or more, where none of that does."""
    if len(seconds) < 4:
        return 0
    later = seconds[len(seconds) // 2 :]
    most = slow * statistics.median(later)
    return next(n for n, step in enumerate(seconds) if step < most) if max(later) < most else 0


def _steps(number: int) -> str:
    return f"{number} timed step" + "s" * (number > 1)


def too_few_steps(case: Case) -> Iterator[Finding]:
    """Medians that their steps do not apply_setting."""
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
                    "times too few steps to know their spread",
                    _steps(num_steps),
                    f"steps: {runs[0].warmup_steps + ENOUGH_STEPS} or more",
                )
            continue
        settled = [
            seconds[_num_slow(seconds, SLOW_START[_where(runs[0])]) :] for seconds in measured
        ]  # a slow start is a fault of its own
        uncertain, spread = max((_uncertainty(seconds), seconds) for seconds in settled)
        if uncertain > _MOST_UNCERTAIN[_where(runs[0])]:
            yield Finding(
                "untrustworthy",
                (trial,),
                "times too few steps for how much they differ",
                f"{_steps(len(spread))} of {min(spread):.3g} to {max(spread):.3g} s: the median is known to "
                f"±{uncertain:.0%} only",
                "more steps, and a machine that nothing else uses",
            )


def _too_few_planned(trial: str, runs: Sequence[RunRecord]) -> Iterator[Finding]:
    num_steps = sum(max(0, record.num_steps - record.warmup_steps) for record in runs)
    if num_steps < ENOUGH_STEPS and is_on_gpu(runs[0]):
        yield Finding(
            "untrustworthy" if num_steps < FEWEST_STEPS else "note",
            (trial,),
            "will time too few steps to know their spread",
            f"{_steps(num_steps)} (steps: {runs[0].num_steps}, warmup_steps: {runs[0].warmup_steps})",
            f"steps: {runs[0].warmup_steps + ENOUGH_STEPS} or more",
        )


def _uncertainty(seconds: Sequence[float]) -> float:
    """The half width of the median's 95% interval, over the median."""
    if len(seconds) < 2:
        return 0.0
    sigma = (quantile(seconds, 0.9) - quantile(seconds, 0.1)) / _SIGMAS_BETWEEN_P10_AND_P90
    error = _SIGMAS_OF_95_PERCENT * _MEDIAN_TO_MEAN * sigma / len(seconds) ** 0.5
    return error / statistics.median(seconds)


def repeats(case: Case) -> Iterator[Finding]:
    """Runs of one trial that disagree."""
    for trial, runs in case.good_by_trial.items():
        speeds = speeds_of(runs)
        if len(speeds) < 2:
            continue
        apart = (max(speeds) - min(speeds)) / statistics.median(speeds)
        if apart > _MOST_APART[_where(runs[0])]:
            yield Finding(
                "untrustworthy",
                (trial,),
                "its repeats disagree",
                f"{min(speeds):,.0f} to {max(speeds):,.0f} tok/s per device over {len(speeds)} runs, {apart:.0%} apart",
                "look for other users of the GPUs, hosts or network, and for throttled clocks; then run it again",
            )


def too_close(case: Case) -> Iterator[Finding]:
    """Trials that the verdict calls equal to the best: the next run may not confirm it."""
    rows, spreads = summarize(case.records, case.reference), spreads_of(case.records)
    for _, group in groupby(rows, key=lambda row: row.work_class):
        decision = decide(list(group), spreads, case.reference)
        if decision.best and decision.equals:
            first, near = decision.best, [row.trial for row in decision.equals]
            spread = "spreads overlap its own" if len(near) > 1 else "spread overlaps its own"
            yield Finding(
                "note",
                (first.trial, *near),
                "are too close to say which is fastest",
                f"{first.trial} {first.tokens_per_second_per_device:,.0f} tok/s per device, {names(near)}: {spread}",
                "repeats: 3 or more, or take whichever is simpler",
            )


def one_run(case: Case) -> Iterator[Finding]:
    """A comparison without any repeat."""
    if len(case.good_by_trial) > 1 and case.on_gpus and all(len(runs) == 1 for runs in case.by_trial.values()):
        yield Finding(
            "note",
            (),
            "each trial is run once, so how far a second run would differ is not known",
            f"{len(case.by_trial)} trials, one run each",
            "repeats: 3 in the study, or in its best trials",
        )


def _where(record: RunRecord) -> str:
    return "gpu" if is_on_gpu(record) else "cpu"
