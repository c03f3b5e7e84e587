"""The charts of a work class, each with its words and its figures; absent where nothing was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from megabench.metrics import quantile
from megabench.study.report import lines, strips
from megabench.study.report.strips import Strip
from megabench.study.report.trials import Shown, WorkClassOfTrials

_LEAST_DIFFERENCE = 1e-9  # equal losses have no logarithm

# parts of a profiled step, in the order they are stacked, and their colours; the exposed ones are hatched
_PART_CLASSES = {
    "matrix products": "part-matmul",
    "attention": "part-attention",
    "optimizer": "part-optimizer",
    "other compute": "part-other",
    "copies": "part-copies",
}
_WAITING_CLASSES = ("part-wait0", "part-wait1", "part-wait2", "part-wait3")


@dataclass(frozen=True)
class Figures:
    """A small table: heads, and rows of cells."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A picture with its heading, what to see in it, a legend of (class, words), and its figures as a table."""

    heading: str
    words: str
    picture: Markup
    legend: tuple[tuple[str, str], ...] = ()
    figures: Figures | None = None
    is_wide: bool = False


def charts_of(group: WorkClassOfTrials, slug: str, device: str) -> list[Chart]:
    """All charts of a work class that its records can fill, the speeds first."""
    made = [
        _speeds(group, f"{slug}-speed", device),
        _losses(group, f"{slug}-loss"),
        _differences(group, f"{slug}-difference"),
        _steps(group, f"{slug}-steps"),
        _memory(group, f"{slug}-memory", device),
        _profiles(group, f"{slug}-profile"),
        *_scaling(group, f"{slug}-scaling", device),
    ]
    return [chart for chart in made if chart]


def strip_class(trial: Shown, group: WorkClassOfTrials) -> str:
    """The class that colours a trial's strip by its part in the verdict."""
    if not trial.row.is_ok:
        return "bad"
    if trial.row is group.decision.best:
        return "best"
    return "reference" if trial.row is group.decision.reference else "plain"


def strip_name(trial: Shown, group: WorkClassOfTrials) -> str:
    """The trial's letter and name, and its part in the verdict."""
    part = {"best": " · fastest", "reference": " · reference", "bad": f" · {trial.row.status.upper()}", "plain": ""}
    if trial.row is group.decision.best and group.decision.equals:
        part["best"] = ""
    return f"{trial.letter} · {trial.name}{part[strip_class(trial, group)]}"


def _speeds(group: WorkClassOfTrials, slug: str, device: str) -> Chart | None:
    shown = group.measured
    if not shown:
        return None
    made = [
        Strip(
            name=strip_name(trial, group),
            figure=f"{trial.row.tokens_per_second_per_device:,.0f}"
            + (f" · {trial.row.ratio:.2f} ×" if trial.row.ratio is not None else ""),
            class_=strip_class(trial, group),
            value=trial.row.tokens_per_second_per_device or 0.0,
            spread=trial.spread,
        )
        for trial in shown
    ]
    of = {trial.spread.of for trial in shown if trial.spread}
    line = "the slowest run to the fastest" if of == {"runs"} else "the slow tenth of steps to the fast tenth"
    words = f"Longer is better. The figure is tokens a second on one {device}" + (
        f", and how many times that is what {group.decision.head} reaches." if group.decision.reference else "."
    )
    words += f" The thin line is the spread, from {line}." if of else ""
    description = "; ".join(f"{strip.name}: {strip.figure}" for strip in made)
    title = f"Tokens a second per {device}"
    return Chart(title, words, strips.bars(slug, title, description, made, f"tok/s per {device}"), is_wide=True)


def _losses(group: WorkClassOfTrials, slug: str) -> Chart | None:
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
        "All trials start from the same weights and read the same text, so their curves must lie on one another: "
        "where you see one line, they do.",
        picture,
        _letter_legend(shown),
        Figures(
            ("trial", "steps", "first loss", "last loss"),
            tuple((t.name, str(len(t.record.losses)), f"{_finite(t)[0]:.5f}", f"{_finite(t)[-1]:.5f}") for t in shown),
        ),
    )


def _differences(group: WorkClassOfTrials, slug: str) -> Chart | None:
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
    limit = lines.Limit(parity.tolerance, f"tolerance {parity.tolerance:g}: above it work is not the same")
    description = "; ".join(f"{t.name}: {parity_words(t)}" for t in others)
    heading = f"How far losses are from those of {standard.name}"
    picture = lines.lines(slug, heading, description, drawn, "step", (low, high), is_log=True, limit=limit)
    return Chart(
        heading,
        "As a share of the loss. Below the dashed line it is rounding, which depends on the order of summation; "
        "a trial above it trained something else and is not ranked.",
        picture,
        _letter_legend(others),
        Figures(("trial", "verdict"), tuple((trial.name, parity_words(trial)) for trial in group.measured)),
    )


def parity_words(trial: Shown) -> str:
    """Whether a trial did the same work, in words."""
    row = trial.row
    if row.parity == "unknown":
        return "not known"
    if row.parity == "equal" and trial.record.parity and trial.record.parity.reference == trial.name:
        return "the one compared with"
    difference = "" if row.max_relative_difference is None else f", {row.max_relative_difference:.1g} at most"
    return f"{'equal' if row.parity == 'equal' else 'DIVERGED'}{difference}"


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
        "How long each step took",
        "One dot a timed step, the upright line their median. Dots far apart, or a few far to the right, mean that "
        "something disturbs the run.",
        strips.dots(slug, "Seconds of each timed step", description, made, "s a step"),
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
    full = f"the {capacity:.0f} GiB that a GPU has" if capacity else f"the largest peak, {top:.1f} GiB"
    what = "reserved on the GPU" if device == "GPU" else "resident memory of the process"
    description = "; ".join(f"{strip.name}: {strip.figure} at most" for strip in made)
    return Chart(
        "Memory of each rank",
        f"One column a rank, from rank 0 on the left: its peak, {what}. The full height is {full}.",
        strips.columns(slug, "Peak memory of each rank in GiB", description, made, top),
        figures=Figures(("trial", "largest GiB", "GiB by rank"), tuple(figures)),
    )


def _profiles(group: WorkClassOfTrials, slug: str) -> Chart | None:
    shown = [trial for trial in group.measured if trial.record.profile]
    if not shown:
        return None
    found = {part for trial in shown if trial.record.profile for part in trial.record.profile.seconds}
    waits = sorted(part for part in found if part.startswith("exposed "))
    parts = [*(part for part in _PART_CLASSES if part in found), *waits]
    parts += sorted(found - {*parts, "idle"}) + ["idle"] * ("idle" in found)
    classes = _PART_CLASSES | {part: _WAITING_CLASSES[n % len(_WAITING_CLASSES)] for n, part in enumerate(waits)}
    classes = {part: classes.get(part, "part-idle" if part == "idle" else "part-other") for part in parts}
    made, figures = [], []
    for trial in shown:
        profile = trial.record.profile
        assert profile is not None
        segments = [(part, profile.seconds[part]) for part in parts if profile.seconds.get(part)]
        name, total = strip_name(trial, group), sum(seconds for _, seconds in segments)
        made.append(Strip(name, f"{total:.3g} s", "", segments=segments))
        figures.append((trial.name, f"{total:.3g}", *(f"{profile.seconds.get(part, 0.0):.3g}" for part in parts)))
    description = "; ".join(
        f"{strip.name}: " + ", ".join(f"{_part_words(part)} {seconds:.3g} s" for part, seconds in strip.segments)
        for strip in made
    )
    return Chart(
        "Where a step went",
        "One more step, looked into with a profiler, the mean of all ranks. Hatched is communication that nothing "
        "hides, waiting for other ranks included. A profiled step is slower than a timed one.",
        strips.stacks(slug, "Where a step went, in seconds", description, made, classes, "s"),
        tuple((classes[part], _part_words(part)) for part in parts),
        Figures(("trial", "step s", *(f"{_part_words(part)}, s" for part in parts)), tuple(figures)),
        is_wide=True,
    )


def _part_words(part: str) -> str:
    return f"waiting for {part.removeprefix('exposed ')}" if part.startswith("exposed ") else part


def _scaling(group: WorkClassOfTrials, slug: str, device: str) -> list[Chart]:
    """Throughput, and days for 100 billion tokens, against the number of devices, where trials differ in it."""
    shown = [trial for trial in group.measured if trial.row.is_ok and trial.record.tokens_per_second]
    if len({trial.row.world_size for trial in shown}) < 2:
        return []
    speeds = [(t, t.row.world_size, t.row.world_size * (t.row.tokens_per_second_per_device or 0.0)) for t in shown]
    units = f"{device}s" if device == "GPU" else "processes"
    first = min(speeds, key=lambda entry: (entry[1], -entry[2]))
    sizes = [size for _, size, _ in speeds]
    ideal = [(size, first[2] / first[1] * size) for size in (min(sizes), max(sizes))]
    dots = [lines.Line(trial.letter, trial.number, [(size, speed)]) for trial, size, speed in speeds]
    top = max([speed for _, _, speed in speeds] + [speed for _, speed in ideal]) * 1.08
    table = Figures(
        ("trial", units, "tok/s", "days for 100 B tokens"),
        tuple((t.name, str(size), f"{speed:,.0f}", f"{_days(speed):,.1f}") for t, size, speed in speeds),
    )
    described = "; ".join(f"{trial.name}: {speed:,.0f} tokens/s on {size}" for trial, size, speed in speeds)
    heading = f"Tokens a second against number of {units}"
    throughput = Chart(
        heading,
        f"All {units} together. The dotted line is what {first[0].name} would reach without any loss.",
        lines.lines(slug, heading, described, [lines.Line("", 0, ideal, True), *dots], units, (0, top), with_dots=True),
        _letter_legend(shown),
        table,
    )
    days = [lines.Line(trial.letter, trial.number, [(size, _days(speed))]) for trial, size, speed in speeds]
    most = max(_days(speed) for _, _, speed in speeds) * 1.08
    heading = f"Days for 100 billion tokens against number of {units}"
    described = "; ".join(f"{trial.name}: {_days(speed):,.1f} days on {size}" for trial, size, speed in speeds)
    return [
        throughput,
        Chart(
            heading,
            "How long a training run of that length would take without a stop.",
            lines.lines(f"{slug}-days", heading, described, days, units, (0, most), with_dots=True),
            _letter_legend(shown),
        ),
    ]


def _days(tokens_per_second: float) -> float:
    return 100e9 / tokens_per_second / 86400


def _finite(trial: Shown) -> list[float]:
    return [loss for loss in trial.record.losses if loss is not None]


def _letter_legend(shown: Sequence[Shown]) -> tuple[tuple[str, str], ...]:
    return tuple((lines.line_classes(trial.number), f"{trial.letter} · {trial.name}") for trial in shown)


def _thinned(values: Sequence[float], most: int = 300) -> list[float]:
    """At most about `most` of the values, evenly from the sorted ones, both ends among them."""
    if len(values) <= most:
        return list(values)
    ordered = sorted(values)
    return [ordered[round(number * (len(ordered) - 1) / (most - 1))] for number in range(most)]
