"""Charts of fp8 trials beside their bf16 references: the losses, and the differences of mean losses."""

from collections.abc import Sequence

from megabench.report import line_charts
from megabench.report.chart import Chart, Figures, letter_legend
from megabench.report.parity_charts import losses_chart
from megabench.report.trials import Shown, StudyView
from megabench.study.bf16_reference import (
    MOST_STEPS,
    classes_compared_with_bf16,
    compare_with_bf16,
    has_fp8,
    mean_loss,
)


def precision_charts(view: StudyView) -> list[Chart]:
    """Return the charts of all fp8 trials, bf16 references and bf16 trials of other seeds, or [] without them."""
    records = view.study.records
    compared = classes_compared_with_bf16(records)
    shown = [trial for group in view.classes if group.key in compared for trial in group.measured]
    words = (
        "fp8 trials and the bf16 trials that they are compared with. All trials read the same text in the same order. "
        "Trials of one seed start from the same weights."
    )
    charts = [losses_chart(shown, "precision-loss", words), _differences_chart(shown, view)]
    return [chart for chart in charts if chart]


def _differences_chart(shown: Sequence[Shown], view: StudyView) -> Chart | None:
    """Return the chart of the difference from bf16 of the mean loss of MOST_STEPS steps, for runs that are longer."""
    records = view.study.records
    compared = [c for trial in shown if (c := compare_with_bf16(trial.record, records)) and c.is_long_enough]
    standards = [trial for trial in shown if trial.name in {comparison.reference for comparison in compared}]
    if len(standards) != 1:
        return None
    (standard,) = standards
    drawn = [(trial, _differences(trial, standard)) for trial in shown if trial is not standard]
    drawn = [(trial, points) for trial, points in drawn if any(value is not None for _, value in points)]
    late = [value for _, points in drawn for _, value in points[len(points) // 4 :] if value is not None]
    low, high = min(0.0, *late), max(0.0, *late)
    margin = (high - low) * 0.1 or 0.1
    heading = f"Difference of the mean loss from {standard.name}, in percent"
    rows = tuple((trial.name, f"{points[-1][1]:+.2f}") for trial, points in drawn if points[-1][1] is not None)
    curves = [line_charts.Line(trial.letter, trial.number, points) for trial, points in drawn]
    picture = line_charts.lines(
        "precision-difference",
        heading,
        "; ".join(": ".join(row) for row in rows),
        curves,
        "step",
        (low - margin, high + margin),
        limit=line_charts.Limit(0.0, standard.name),
    )
    words = (
        f"Each point is the difference of the mean loss of {MOST_STEPS} steps. The bf16 trials of other seeds show how "
        "far losses differ by chance."
        if len(drawn) > sum(has_fp8(trial.record) for trial, _ in drawn)
        else f"Each point is the difference of the mean loss of {MOST_STEPS} steps."
    )
    figures = Figures(("trial", "last difference, %"), rows)
    return Chart(heading, words, picture, letter_legend([trial for trial, _ in drawn]), figures)


def _differences(trial: Shown, standard: Shown) -> list[line_charts.Point]:
    first = max(trial.record.first_step, standard.record.first_step) + 1
    last = min(one.record.first_step + len(one.record.losses) - 1 for one in (trial, standard))
    points: list[line_charts.Point] = []
    for step in range(first + MOST_STEPS - 1, last + 1):
        steps = range(step - MOST_STEPS + 1, step + 1)
        mine, its = mean_loss(trial.record, steps), mean_loss(standard.record, steps)
        points.append((step, None if mine is None or its is None else 100 * (mine / its - 1)))
    return points
