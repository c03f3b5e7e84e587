"""Charts of the losses: the curves on one another, and how far they are apart."""

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


def differences_chart(group: WorkClassOfTrials, slug: str) -> Chart | None:
    """The losses' relative difference from the standard's, step by step, with the tolerance drawn."""
    judged = [t for t in group.measured if t.record.parity and t.record.parity.max_relative_difference is not None]
    if not judged or judged[0].record.parity is None:
        return None
    parity = judged[0].record.parity
    standard = next((trial for trial in group.measured if trial.name == parity.reference), None)
    others = [trial for trial in judged if trial is not standard]
    if not standard or not others or len(standard.record.losses) < 2:
        return None
    drawn, everything = [], []
    for trial in others:
        points: list[lines.Point] = []
        pairs = zip(trial.record.losses, standard.record.losses, strict=True)
        for step, (a, b) in enumerate(pairs, trial.record.first_step):
            value = None if a is None or b is None else max(abs(a - b) / max(abs(b), 1e-12), _LEAST_DIFFERENCE)
            points.append((step, value))
            everything += [value] if value else []
        drawn.append(lines.Line(trial.letter, trial.number, points))
    low = max(min(everything) / 2, _LEAST_DIFFERENCE / 2)
    high = max(max(everything), parity.tolerance) * 4
    limit = lines.Limit(parity.tolerance, f"tolerance {parity.tolerance:g}")
    description = "; ".join(f"{t.name}: {parity_words(t)}" for t in others)
    heading = f"How far losses are from those of {standard.name}"
    picture = lines.lines(slug, heading, description, drawn, "step", (low, high), is_log=True, limit=limit)
    return Chart(
        heading,
        "As a share of the loss. Below the dashed line it is rounding, which depends on the order of summation; "
        "a trial above it trained something else and is not ranked.",
        picture,
        letter_legend(others),
        Figures(("trial", "verdict"), tuple((trial.name, parity_words(trial)) for trial in group.measured)),
    )


def parity_words(trial: Shown) -> str:
    """Whether a trial did the same work, in words."""
    row = trial.row
    if row.is_ok and trial.record.parity and trial.record.parity.reference == trial.name:
        return "the one compared with"
    if row.parity == "unknown":
        return "not known"
    difference = "" if row.max_relative_difference is None else f", {row.max_relative_difference:.1g} at most"
    return f"{'equal' if row.parity == 'equal' else 'DIVERGED'}{difference}"


def _finite(trial: Shown) -> list[float]:
    return [loss for loss in trial.record.losses if loss is not None]
