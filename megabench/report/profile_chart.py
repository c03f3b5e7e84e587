"""Chart of the step time by part (compute, communication, idle) for profiled trials."""

from collections.abc import Mapping, Sequence

from megabench.report import bar_charts
from megabench.report.bar_charts import Strip
from megabench.report.chart import Chart, Figures, strip_name
from megabench.report.trials import WorkClassOfTrials

# Parts of a profiled step in stacking order, with their CSS classes. Exposed communication is hatched.
_PART_CLASSES = {
    "matrix products": "part-matmul",
    "attention": "part-attention",
    "optimizer": "part-optimizer",
    "other compute": "part-other",
    "copies": "part-copies",
}
_WAITING_CLASSES = tuple(f"part-wait{number}" for number in range(8))  # the page template defines eight hatch patterns
_LEAST_SHARE = 0.005  # a part below this fraction of the step in all trials is too small to draw


def profiles_chart(group: WorkClassOfTrials, slug: str) -> Chart | None:
    """Return stacked bars of the seconds per part of a step, or None if no trial was profiled."""
    shown = [trial for trial in group.measured if trial.record.profile]
    if not shown:
        return None
    found = {part for trial in shown if trial.record.profile for part in trial.record.profile.seconds}
    seen = _visible([trial.record.profile.seconds for trial in shown if trial.record.profile])
    waits = sorted(part for part in seen if part.startswith("exposed "))
    parts = [*(part for part in _PART_CLASSES if part in seen), *waits]
    parts += sorted(seen - {*parts, "idle"}) + ["idle"] * ("idle" in seen)
    columns = [*parts, *sorted(found - seen)]
    classes = _PART_CLASSES | {part: _WAITING_CLASSES[n % len(_WAITING_CLASSES)] for n, part in enumerate(waits)}
    classes = {part: classes.get(part, "part-idle" if part == "idle" else "part-other") for part in parts}
    made, figures = [], []
    for trial in shown:
        profile = trial.record.profile
        assert profile is not None
        segments = [(part, profile.seconds[part]) for part in parts if profile.seconds.get(part)]
        name, total = strip_name(trial, group), sum(profile.seconds.values())
        made.append(Strip(name, f"{total:.3g} s", "", segments=segments))
        figures.append((trial.name, f"{total:.3g}", *(f"{profile.seconds.get(part, 0.0):.3g}" for part in columns)))
    description = "; ".join(
        f"{strip.name}: " + ", ".join(f"{_part_words(part)} {seconds:.3g} s" for part, seconds in strip.segments)
        for strip in made
    )
    return Chart(
        "Time of a step by part",
        "The chart shows one additional profiled step, averaged over all ranks. Hatched parts are exposed "
        "communication, including the time spent waiting for other ranks. Profiling can slow a step down.",
        bar_charts.stacks(slug, "Time of a step by part, in seconds", description, made, classes, "s"),
        tuple((classes[part], _part_words(part)) for part in parts),
        Figures(("trial", "step s", *(f"{_part_words(part)}, s" for part in columns)), tuple(figures)),
        is_wide=True,
    )


def _visible(profiles: Sequence[Mapping[str, float]]) -> set[str]:
    """Return the parts that are large enough to draw in the step of at least one trial."""
    return {
        part
        for seconds in profiles
        for part, amount in seconds.items()
        if amount >= _LEAST_SHARE * sum(seconds.values()) and amount > 0
    }


def _part_words(part: str) -> str:
    return f"waiting for {part.removeprefix('exposed ')}" if part.startswith("exposed ") else part
