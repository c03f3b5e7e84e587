"""Parity charts: the losses of all trials, and the relative differences of losses and gradient norms."""

from collections.abc import Sequence
from typing import Literal

from megabench.report import line_charts
from megabench.report.chart import Chart, Figures, letter_legend
from megabench.report.trials import Shown, WorkClassOfTrials
from megabench.study.parity import NUM_NORMS, from_same_step, relative_differences

_LEAST_DIFFERENCE = 1e-9  # the lower end of the logarithmic axis, on which zero differences are shown


_SAME_WORK = (
    "All trials start from the same weights and read the same text, so their loss curves must coincide. The next "
    "charts show the differences between the curves."
)


def losses_chart(trials: Sequence[Shown], slug: str, words: str = _SAME_WORK) -> Chart | None:
    """Return the chart of the loss at every step. Only trials with a valid result determine the axis range."""
    shown = [trial for trial in trials if _finite(trial)]
    if not shown or max(len(trial.record.losses) for trial in shown) < 2:
        return None
    trusted = [loss for trial in shown if trial.row.is_ok for loss in _finite(trial)]
    seen = trusted or [loss for trial in shown for loss in _finite(trial)]
    low, high = min(seen), max(seen)
    margin = (high - low) * 0.08 or abs(high) * 0.02 or 1.0
    drawn = [
        line_charts.Line(trial.letter, trial.number, list(enumerate(trial.record.losses, trial.record.first_step)))
        for trial in shown
    ]
    description = "; ".join(f"{t.name}: from {_finite(t)[0]:.4f} to {_finite(t)[-1]:.4f}" for t in shown)
    picture = line_charts.lines(slug, "Loss at every step", description, drawn, "step", (low - margin, high + margin))
    return Chart(
        "Loss at every step",
        words,
        picture,
        letter_legend(shown),
        Figures(
            ("trial", "steps", "first loss", "last loss"),
            tuple((t.name, str(len(t.record.losses)), f"{_finite(t)[0]:.5f}", f"{_finite(t)[-1]:.5f}") for t in shown),
        ),
    )


_GROWN = ", unless its difference has grown from rounding, which the table states as equal"


def difference_charts(group: WorkClassOfTrials, slug: str) -> list[Chart]:
    """Return the charts of the relative differences to the parity reference at each step, with the tolerance."""
    judged = [t for t in group.measured if t.record.parity and t.record.parity.max_relative_difference is not None]
    if not judged or (parity := judged[0].record.parity) is None:
        return []
    standard = next((trial for trial in group.measured if trial.name == parity.reference), None)
    others = [trial for trial in judged if trial is not standard]
    if not standard or not others or len(standard.record.losses) < 2:
        return []
    has_grown = any(  # from rounding
        trial.row.parity == "equal" and (trial.row.max_relative_difference or 0) > parity.tolerance for trial in others
    )
    losses = _differences_chart(
        f"Relative difference of the losses from {standard.name}",
        "Differences below the dashed line are rounding errors, which depend on the order of summation. A trial above "
        f"the dashed line did different work and is not ranked{_GROWN * has_grown}.",
        [_differences(trial, standard, "losses") for trial in others],
        slug,
        parity.tolerance,
        Figures(("trial", "verdict"), tuple((trial.name, parity_words(trial)) for trial in group.measured)),
    )
    norms = _differences_chart(
        f"Relative difference of the gradient norms from {standard.name}",
        "Gradient norms reveal wrong gradients even while the learning rate is too small to affect the losses. A trial "
        f"is not ranked if its median over the first {NUM_NORMS} steps is above the dashed line.",
        [_differences(trial, standard, "grad_norms") for trial in others],
        f"{slug}-norms",
        parity.grad_norm_tolerance,
        Figures(("trial", f"in the first {NUM_NORMS} steps"), tuple((t.name, _norm_words(t)) for t in others)),
    )
    return [chart for chart in (losses, norms) if chart]


def _differences(
    trial: Shown, standard: Shown, series: Literal["losses", "grad_norms"]
) -> tuple[Shown, int, list[float | None]]:
    first, mine, theirs = from_same_step(trial.record, standard.record, series)
    return trial, first, relative_differences(mine, theirs)


def _differences_chart(
    heading: str,
    words: str,
    differences: Sequence[tuple[Shown, int, list[float | None]]],
    slug: str,
    tolerance: float | None,
    figures: Figures,
) -> Chart | None:
    drawn = []
    for trial, first, values in differences:
        drawable = [None if value is None else max(value, _LEAST_DIFFERENCE) for value in values]
        drawn.append(line_charts.Line(trial.letter, trial.number, list(enumerate(drawable, first))))
    everything = [value for line in drawn for _, value in line.points if value is not None]
    if not everything or tolerance is None:
        return None
    low, high = max(min(everything) / 2, _LEAST_DIFFERENCE / 2), max(*everything, tolerance) * 4
    limit = line_charts.Limit(tolerance, f"tolerance {tolerance:g}")
    description = "; ".join(": ".join(row) for row in figures.rows)
    picture = line_charts.lines(slug, heading, description, drawn, "step", (low, high), is_log=True, limit=limit)
    return Chart(heading, words, picture, letter_legend([trial for trial, *_ in differences]), figures)


def parity_words(trial: Shown) -> str:
    """Describe whether a trial did the same work as the parity reference."""
    row = trial.row
    if row.is_ok and trial.record.parity and trial.record.parity.reference == trial.name:
        return "parity reference"
    if row.parity == "unknown":
        return "not known"
    losses = "" if row.max_relative_difference is None else f", {row.max_relative_difference:.1g} at most"
    norms = "" if row.grad_norm_difference is None else f", gradient norms {row.grad_norm_difference:.1g}"
    part = row.tensor_difference_in_tolerances
    tensors = "" if part is None else f"; tensors by up to {part:.2g} of their tolerance"
    return f"equal{losses}{tensors}" if row.parity == "equal" else f"DIVERGED{losses}{norms}{tensors}"


def _norm_words(trial: Shown) -> str:
    difference = trial.row.grad_norm_difference
    return "–" if difference is None else f"{difference:.1g}"


def _finite(trial: Shown) -> list[float]:
    return [loss for loss in trial.record.losses if loss is not None]
