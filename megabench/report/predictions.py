"""Chart of predicted against measured step times, with one dot per trial."""

from megabench.report import line_charts
from megabench.report.chart import Chart, Figures, letter_legend
from megabench.report.trials import WorkClassOfTrials
from megabench.study.planned_trials import regret_sentence


def predictions_chart(group: WorkClassOfTrials, slug: str) -> Chart | None:
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
