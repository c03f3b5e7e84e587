"""Scaling charts over the number of devices: throughput, and days to train on 100 billion tokens."""

from collections.abc import Sequence

from megabench.metrics import training_days
from megabench.report import line_charts
from megabench.report.chart import Chart, Figures, letter_legend
from megabench.report.trials import Shown, WorkClassOfTrials


def scaling_charts(group: WorkClassOfTrials, slug: str, device: str) -> list[Chart]:
    """Return both scaling charts if the trials use different numbers of devices, otherwise an empty list."""
    shown = [trial for trial in group.measured if trial.row.is_ok and trial.record.tokens_per_second]
    if len({trial.row.world_size for trial in shown}) < 2:
        return []
    speeds = [(t, t.row.world_size, t.row.world_size * (t.row.tokens_per_second_per_device or 0.0)) for t in shown]
    units = f"{device}s" if device == "GPU" else "processes"
    first = min(speeds, key=lambda entry: (entry[1], -entry[2]))
    sizes = [size for _, size, _ in speeds]
    ideal = [(size, first[2] / first[1] * size) for size in (min(sizes), max(sizes))]
    table = Figures(
        ("trial", units, "tok/s", "days for 100 B tokens"),
        tuple((t.name, str(size), f"{speed:,.0f}", f"{training_days(speed):,.1f}") for t, size, speed in speeds),
    )
    top = 1.08 * max(speed for _, speed in [*ideal, *((size, speed) for _, size, speed in speeds)])
    described = "; ".join(f"{trial.name}: {speed:,.0f} tokens/s on {size}" for trial, size, speed in speeds)
    heading = f"Throughput by number of {units}"
    dots = [line_charts.Line("", 0, ideal, "guide"), *_with_families(speeds)]
    throughput = Chart(
        heading,
        f"Tokens per second of all {units} together. A line connects trials that differ only in the number of "
        f"{units}. The dotted line shows ideal scaling from {first[0].name}.",
        line_charts.lines(slug, heading, described, dots, units, (0, top), with_dots=True),
        letter_legend(shown),
        table,
    )
    days = [(trial, size, training_days(speed)) for trial, size, speed in speeds]
    top = 1.08 * max(count for _, _, count in days)
    described = "; ".join(f"{trial.name}: {count:,.1f} days on {size}" for trial, size, count in days)
    heading = f"Days for 100 billion tokens by number of {units}"
    return [
        throughput,
        Chart(
            heading,
            "Duration of an uninterrupted training run on 100 billion tokens.",
            line_charts.lines(
                f"{slug}-days", heading, described, _with_families(days), units, (0, top), with_dots=True
            ),
            letter_legend(shown),
        ),
    ]


def _with_families(points: Sequence[tuple[Shown, int, float]]) -> list[line_charts.Line]:
    """Return a dot for each trial, and lines that connect trials with the same engine, TP, CP, PP and VP sizes."""
    families: dict[object, list[line_charts.Point]] = {}
    for trial, size, value in sorted(points, key=lambda point: point[1]):
        layout = trial.record.layout
        family = (trial.row.engine, layout.tp, layout.cp, layout.pp, layout.vp)
        families.setdefault(family, []).append((size, value))
    joined = [line_charts.Line("", 0, members, "family") for members in families.values()]
    return joined + [line_charts.Line(trial.letter, trial.number, [(size, value)]) for trial, size, value in points]
