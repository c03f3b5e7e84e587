"""Charts of parity: the losses on one another, and how far losses and gradient norms are apart."""

from collections.abc import Callable, Sequence

from megabench.record import RunRecord
from megabench.study.parity import Values, relative_differences
from megabench.study.report import lines
from megabench.study.report.chart import Chart, Figures, letter_legend
from megabench.study.report.trials import Shown, WorkClassOfTrials

_LEAST_DIFFERENCE = 1e-9  # equal losses have no logarithm


def losses_chart(group: WorkClassOfTrials, slug: str) -> Chart | None:
    """The loss of every trial at every step; the axis is that of the trials that may be trusted."""
    shown = [trial for trial in group.measured if _finite(trial)]
    if not shown or max(len(trial.record.losses) for trial in shown) < 2:
        return None
    trusted = [loss for trial in shown if trial.row.is_ok for loss in _finite(trial)]
    seen = trusted or [loss for trial in shown for loss in _finite(trial)]
    low, high = min(seen), max(seen)
    margin = (high - low) * 0.08 or abs(high) * 0.02 or 1.0
    drawn = [
        lines.Line(trial.letter, trial.number, list(enumerate(trial.record.losses, trial.record.first_step)))
        for trial in shown
    ]
    description = "; ".join(f"{t.name}: from {_finite(t)[0]:.4f} to {_finite(t)[-1]:.4f}" for t in shown)
    picture = lines.lines(slug, "Loss at every step", description, drawn, "step", (low - margin, high + margin))
    return Chart(
        "Loss at every step",
        "All trials start from the same weights and read the same text, so their curves must lie on one another. How "
        "far they are apart is judged in the picture after this one.",
        picture,
        letter_legend(shown),
        Figures(
            ("trial", "steps", "first loss", "last loss"),
            tuple((t.name, str(len(t.record.losses)), f"{_finite(t)[0]:.5f}", f"{_finite(t)[-1]:.5f}") for t in shown),
        ),
    )


def difference_charts(group: WorkClassOfTrials, slug: str) -> list[Chart]:
    """How far losses and gradient norms are from the standard's, step by step, with the tolerance drawn."""
    judged = [t for t in group.measured if t.record.parity and t.record.parity.max_relative_difference is not None]
    if not judged or (parity := judged[0].record.parity) is None:
        return []
    standard = next((trial for trial in group.measured if trial.name == parity.reference), None)
    others = [trial for trial in judged if trial is not standard]
    if not standard or not others or len(standard.record.losses) < 2:
        return []
    losses = _differences_chart(
        "losses", "As a share of the loss. ", standard, others, slug, lambda record: record.losses, parity.tolerance
    )
    norms = _differences_chart(
        "gradient norms",
        "As a share of the norm, which shows wrong gradients while the learning rate is too small for losses to. ",
        standard,
        [trial for trial in others if trial.record.grad_norms],
        f"{slug}-norms",
        lambda record: record.grad_norms,
        parity.grad_norm_tolerance or 0.0,
    )
    return [chart for chart in (losses, norms) if chart]


def _differences_chart(
    what: str,
    words: str,
    standard: Shown,
    others: Sequence[Shown],
    slug: str,
    values: Callable[[RunRecord], Values],
    tolerance: float,
) -> Chart | None:
    drawn = []
    for trial in others:
        differences = relative_differences(values(trial.record), values(standard.record))
        points = [
            (step, value and max(value, _LEAST_DIFFERENCE))
            for step, value in enumerate(differences, trial.record.first_step)
        ]
        drawn.append(lines.Line(trial.letter, trial.number, points))
    everything = [value for line in drawn for _, value in line.points if value]
    if not everything:
        return None
    low = max(min(everything) / 2, _LEAST_DIFFERENCE / 2)
    high = max(*everything, tolerance) * 4
    limit = lines.Limit(tolerance, f"tolerance {tolerance:g}")
    description = "; ".join(f"{t.name}: {parity_words(t)}" for t in others)
    heading = f"How far {what} are from those of {standard.name}"
    picture = lines.lines(slug, heading, description, drawn, "step", (low, high), is_log=True, limit=limit)
    return Chart(
        heading,
        f"{words}Below the dashed line it is rounding, which depends on the order of summation; a trial above it "
        "trained something else and is not ranked.",
        picture,
        letter_legend(others),
        Figures(("trial", "verdict"), tuple((trial.name, parity_words(trial)) for trial in [standard, *others])),
    )


def parity_words(trial: Shown) -> str:
    """Whether a trial did the same work, in words."""
    row = trial.row
    if row.is_ok and trial.record.parity and trial.record.parity.reference == trial.name:
        return "the one compared with"
    if row.parity == "unknown":
        return "not known"
    losses = "" if row.max_relative_difference is None else f", {row.max_relative_difference:.1g} at most"
    norms = "" if row.max_grad_norm_difference is None else f", gradient norms {row.max_grad_norm_difference:.1g}"
    return f"equal{losses}" if row.parity == "equal" else f"DIVERGED{losses}{norms}"


def _finite(trial: Shown) -> list[float]:
    return [loss for loss in trial.record.losses if loss is not None]
