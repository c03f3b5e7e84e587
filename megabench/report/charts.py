"""Charts of a work class: speed, step time, memory and predictions.

A chart is omitted if the records lack its measurements.
"""

from collections.abc import Sequence

from megabench.metrics import quantile
from megabench.report import bar_charts, line_charts
from megabench.report.bar_charts import Strip
from megabench.report.chart import Chart, Figures, letter_legend, strip_class, strip_name
from megabench.report.parity_charts import difference_charts, losses_chart
from megabench.report.profile_chart import profiles_chart
from megabench.report.scaling import scaling_charts
from megabench.report.trials import Shown, StudyView, WorkClassOfTrials
from megabench.study.planned_trials import regret_sentence


def charts_of(group: WorkClassOfTrials, slug: str, device: str) -> list[Chart]:
    """Return all charts of a work class that its records contain data for, except for the speed chart."""
    made = [
        losses_chart(group.measured, f"{slug}-loss"),
        *difference_charts(group, f"{slug}-difference"),
        _steps(group, f"{slug}-steps"),
        _memory(group, f"{slug}-memory", device),
        profiles_chart(group, f"{slug}-profile"),
        _predictions(group, f"{slug}-prediction"),
        *scaling_charts(group, f"{slug}-scaling", device),
    ]
    return [chart for chart in made if chart]


def speed_chart(view: StudyView) -> Chart | None:
    """Return the chart of the throughput of all trials, or None if none was measured.

    With one work class on GPUs, the chart names the fastest trial and the reference.
    """
    shown = sorted((t for t in view.trials if t.row.tokens_per_second_per_device), key=_speed, reverse=True)
    if not shown:
        return None
    by_trial = {trial.name: group for group in view.classes for trial in group.trials}
    is_one_class = len(view.classes) == 1
    is_ranked = is_one_class and not view.is_cpu
    made = [
        Strip(
            name=strip_name(trial, by_trial[trial.name]) if is_ranked else f"{trial.letter} · {trial.name}",
            figure=f"{_speed(trial):,.0f}"
            + ("" if (ratio := trial.row.throughput_ratio) is None else f" · {ratio:.2f} ×"),
            class_=strip_class(trial, by_trial[trial.name]),
            value=_speed(trial),
            spread=trial.spread,
        )
        for trial in shown
    ]
    of = {trial.spread.of for trial in shown if trial.spread}
    line = "the slowest to the fastest run" if of == {"runs"} else "the 10% slowest to the 10% fastest steps"
    has_ratio = any(trial.row.throughput_ratio is not None for trial in shown)
    words = f"A longer bar is better. The number is the throughput in tokens per second of one {view.device}"
    words += f", followed by its ratio to {view.head}." if has_ratio else "."
    words += f" The thin line shows the spread, from {line}." if of else ""
    words += "" if is_one_class else " The colored bars are the fastest trial and the reference of each workload."
    description = "; ".join(f"{strip.name}: {strip.figure}" for strip in made)
    title, unit = f"Tokens per second per {view.device}", f"tok/s per {view.device}"
    return Chart(title, words, bar_charts.bars("speed", title, description, made, unit), is_wide=True)


def _speed(trial: Shown) -> float:
    return trial.row.tokens_per_second_per_device or 0.0


def _steps(group: WorkClassOfTrials, slug: str) -> Chart | None:
    made, figures = [], []
    for trial in group.measured:
        values = [seconds for run in trial.runs if run.step_seconds for seconds in run.step_seconds.all]
        if not values or not trial.row.step_seconds:
            continue
        median = trial.row.step_seconds
        made.append(
            Strip(
                name=strip_name(trial, group),
                figure=f"{median:.4g} s",
                class_=strip_class(trial, group),
                value=median,
                values=_thinned(values),
            )
        )
        cells = (f"{median:.4g}", f"{quantile(values, 0.1):.4g}", f"{quantile(values, 0.9):.4g}", f"{max(values):.4g}")
        figures.append((trial.name, str(len(values)), *cells))
    if not made:
        return None
    description = "; ".join(f"{strip.name}: median {strip.figure}" for strip in made)
    return Chart(
        "Time of each step",
        "Each dot is one timed step, and the vertical line is the median. Widely scattered dots, or a few dots far "
        "to the right, mean that something disturbed the run.",
        bar_charts.dots(slug, "Seconds of each timed step", description, made, "seconds per step"),
        figures=Figures(("trial", "timed steps", "median s", "p10 s", "p90 s", "longest s"), tuple(figures)),
    )


def _memory(group: WorkClassOfTrials, slug: str, device: str) -> Chart | None:
    shown = [trial for trial in group.measured if trial.record.peak_memory_gib]
    if not shown:
        return None
    made, figures, tops = [], [], []
    for trial in shown:
        peak = trial.record.peak_memory_gib
        assert peak is not None
        made.append(
            Strip(strip_name(trial, group), f"{peak.max:.1f} GiB", strip_class(trial, group), 0.0, None, peak.per_rank)
        )
        figures.append((trial.name, f"{peak.max:.2f}", ", ".join(f"{gib:.2f}" for gib in peak.per_rank)))
        tops.append(peak.max)
    capacity = max((t.record.device_memory_gib for t in shown if t.record.device_memory_gib), default=None)
    top = max([*tops, capacity or 0.0])
    full = f"the GPU memory of {capacity:.0f} GiB" if capacity else f"the largest peak, {top:.1f} GiB"
    what = "peak reserved GPU memory" if device == "GPU" else "peak resident memory of the process"
    description = "; ".join(f"{strip.name}: {strip.figure} at most" for strip in made)
    return Chart(
        "Memory of each rank",
        f"Each column is the {what} of one rank, starting with rank 0 on the left. A full column is {full}.",
        bar_charts.columns(slug, "Peak memory of each rank in GiB", description, made, top),
        figures=Figures(("trial", "largest GiB", "GiB by rank"), tuple(figures)),
    )


def _thinned(values: Sequence[float], most: int = 300) -> list[float]:
    """Return at most `most` of the values, at equal distances in sorted order, including the minimum and maximum."""
    if len(values) <= most:
        return list(values)
    ordered = sorted(values)
    return [ordered[round(number * (len(ordered) - 1) / (most - 1))] for number in range(most)]


def _predictions(group: WorkClassOfTrials, slug: str) -> Chart | None:
    """Return the chart of predicted over measured step times, or None if no trial has a prediction."""
    shown = [
        (trial, trial.record.prediction, trial.row.step_seconds)
        for trial in group.measured
        if trial.record.prediction and trial.row.step_seconds
    ]
    if not shown:
        return None
    points = [(trial, measured, said.step_seconds) for trial, said, measured in shown if said and measured]
    values = [value for _, measured, predicted in points for value in (measured, predicted)]
    ends = (0.0, 1.08 * max(values))
    dots = [line_charts.Line("", 0, [(end, end) for end in ends], "guide")]
    dots += [line_charts.Line(trial.letter, trial.number, [(measured, said)]) for trial, measured, said in points]
    rows = tuple(
        (trial.name, f"{said:.4g}", f"{measured:.4g}", f"{100 * (said / measured - 1):+.1f}%")
        for trial, measured, said in points
    )
    regret = regret_sentence([run for trial in group.trials for run in trial.runs])
    heading = "Predicted against measured step time"
    described = "; ".join(f"{name}: predicted {said} s, measured {measured} s" for name, said, measured, _ in rows)
    return Chart(
        heading,
        "The vertical axis shows the seconds per step that megabench plan predicted, the horizontal axis the measured "
        "seconds. On the dotted line, both times are equal. A trial above the dotted line was faster than predicted."
        + (f" {regret}" if regret else ""),
        line_charts.lines(slug, heading, described, dots, "measured seconds per step", ends, with_dots=True),
        letter_legend([trial for trial, _, _ in points]),
        Figures(("trial", "predicted s", "measured s", "off by"), rows),
    )
