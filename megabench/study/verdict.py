"""Conclusions about the trials of one work class: the fastest trial, its advantage, and the trials equal to it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from megabench.record import RunRecord
from megabench.study.intervals import CONFIDENCE, FEWEST_RUNS, RatioInterval, paired_ratio
from megabench.study.summary import Row, runs_by_trial

_LEAST_STEPS = 3  # with fewer timed steps, the spread is not meaningful
EQUAL_WITHIN = 0.005  # trials are confirmed as equal if the interval of their ratio is narrower than ± this
_MOST_NAMED = 4  # a sentence with more trials is hard to read

STATUS_WORDS = {
    "ok": "ok",
    "diverged": "diverged",
    "oom": "ran out of memory",
    "timeout": "hit its time limit",
    "failed": "failed",
}


def device_word(records: Sequence[RunRecord]) -> str:
    """Return the unit of throughput figures, which is "GPU", or "process" for CPU runs."""
    return "process" if any(record.device == "cpu" for record in records) else "GPU"


def devices_word(device: str) -> str:
    """Return the plural of `device_word`."""
    return "GPUs" if device == "GPU" else "processes"


@dataclass(frozen=True)
class Spread:
    """The range of tokens/s per device, over several runs or over the steps of a single run (p90 to p10)."""

    low: float
    high: float
    of: Literal["runs", "steps"]

    def overlaps(self, other: "Spread") -> bool:
        return self.low <= other.high and other.low <= self.high


def spread_of(runs: Sequence[RunRecord]) -> Spread | None:
    """Return the spread of a trial, or None if too little was measured."""
    measured = [(r.tokens_per_second_per_device, r.step_seconds) for r in runs if r.tokens_per_second_per_device]
    speeds = [speed for speed, _ in measured if speed]
    if len(speeds) > 1:
        return Spread(min(speeds), max(speeds), "runs")
    for speed, step in measured:
        if speed and step and len(step.all) >= _LEAST_STEPS:
            return Spread(speed * step.median / step.p90, speed * step.median / step.p10, "steps")
    return None


@dataclass(frozen=True)
class Speeds:
    """The tokens/s per device of all runs: by trial and round, and the spread of each trial that has a spread."""

    by_round: Mapping[str, Mapping[int, float]]
    spreads: Mapping[str, Spread]

    def num_runs(self, row: Row) -> int:
        """Return the number of runs that measured a speed."""
        return len(self.by_round[row.trial])

    def ratio(self, row: Row, other: Row) -> RatioInterval | None:
        """Return the interval of the speed of `row` ÷ that of `other`, or None without three common rounds."""
        return paired_ratio(self.by_round[row.trial], self.by_round[other.trial])

    def may_be_as_fast(self, row: Row, other: Row) -> bool:
        """Return whether `row` is not known to be slower than `other`.

        The interval of the ratio decides. Trials without three common rounds may be as fast if their spreads
        overlap.
        """
        if ratio := self.ratio(row, other):
            return ratio.high >= 1
        mine, its = self.spreads.get(row.trial), self.spreads.get(other.trial)
        return bool(mine and its and mine.overlaps(its))


def speeds_by_trial(records: Sequence[RunRecord]) -> Speeds:
    """Return the speeds of the runs of each trial."""
    by_trial = runs_by_trial(records)
    return Speeds(
        by_round={
            trial: {run.repeat: run.tokens_per_second_per_device for run in runs if run.tokens_per_second_per_device}
            for trial, runs in by_trial.items()
        },
        spreads={trial: spread for trial, runs in by_trial.items() if (spread := spread_of(runs))},
    )


@dataclass(frozen=True)
class Decision:
    """The best trial of a work class, and the trials that may be as fast. `good` is sorted best first."""

    good: tuple[Row, ...]
    bad: tuple[Row, ...]
    equals: tuple[Row, ...]
    head: str
    speeds: Speeds

    @property
    def best(self) -> Row | None:
        return self.good[0] if self.good else None

    @property
    def reference(self) -> Row | None:
        """The reference trial, if it has a result."""
        return next((row for row in self.good if row.trial == row.reference), None)

    @property
    def others(self) -> tuple[Row, ...]:
        """The trials with a result behind the best one."""
        return self.good[1:]

    @property
    def undecided(self) -> tuple[Row, ...]:
        """The trials that need more runs before the first place is confirmed. With any, they include the best trial."""
        return undecided(self.good, self.speeds)

    @property
    def equal_within(self) -> str:
        """The range within which trials are equal: the interval of their ratio, or their spread without repeats."""
        has_intervals = self.best and all(self.speeds.ratio(self.best, row) for row in self.equals)
        return f"the {CONFIDENCE} interval" if has_intervals else "their spread"


def undecided(rows: Sequence[Row], speeds: Speeds) -> tuple[Row, ...]:
    """Return the rows that need more runs before the order of the first row and the others is confirmed.

    A row is decided after three runs, if the interval of its ratio to the first row excludes 1 or is narrower than
    ±0.5%. The first row is decided if all others are.
    """

    def is_open(row: Row) -> bool:
        ratio = speeds.ratio(rows[0], row)
        return ratio is None or (ratio.low <= 1 and ratio.half_width >= EQUAL_WITHIN)

    found = tuple(row for row in rows[1:] if is_open(row))
    return (rows[0], *found) if found else ()


def confirmation(rows: Sequence[Row], speeds: Speeds) -> str:
    """Say whether runs confirm the order of the first of at least two rows and the others, in one sentence."""
    missing = undecided(rows, speeds)
    counts = sorted({speeds.num_runs(row) for row in rows})
    runs = " to ".join(dict.fromkeys(str(count) for count in (counts[0], counts[-1])))
    if not missing:
        return f"Confirmed by {runs} runs of each trial."
    if counts[-1] == 1:
        return "Not confirmed: each trial ran once."
    if few := [row.trial for row in rows if speeds.num_runs(row) < FEWEST_RUNS]:
        if len(few) == len(rows):
            return f"Not confirmed: no trial ran {FEWEST_RUNS} times."
        which = listed(few) if len(few) <= _MOST_NAMED else f"{len(few)} of {len(rows)} trials"
        return f"Not confirmed: {which} ran fewer than {FEWEST_RUNS} times."
    ratios = [ratio for row in missing[1:] if (ratio := speeds.ratio(rows[0], row))]
    if len(ratios) < len(missing) - 1:
        return f"Not confirmed: the trials have fewer than {FEWEST_RUNS} common rounds."
    furthest = max(ratio.furthest for ratio in ratios)
    names = listed([row.trial for row in missing]) if len(missing) <= _MOST_NAMED else f"{len(missing)} trials"
    return f"Not confirmed after {runs} runs of each trial: the speeds of {names} may differ by up to {furthest:.1%}."


def decide(rows: Sequence[Row], speeds: Speeds, head: str) -> Decision:
    """Return the conclusion about the rows of one work class, which are sorted best first.

    `head` is the name of the reference.
    """
    good = tuple(row for row in rows if row.is_ok and row.tokens_per_second_per_device)
    equals = tuple(row for row in good[1:] if speeds.may_be_as_fast(row, good[0]))
    return Decision(good, tuple(row for row in rows if not row.is_ok), equals, head, speeds)


def headline(decision: Decision, device: str, is_compared_with_bf16: bool = False) -> str:
    """Return the conclusion as a sentence, and whether runs confirm it. `device` is the unit of throughput figures.

    With `is_compared_with_bf16`, other sentences compare fp8 and bf16 trials, so that a missing reference in the work
    class needs no mention.
    """
    said = _conclusion(decision, device, is_compared_with_bf16)
    return f"{said} {confirmation(decision.good, decision.speeds)}" if decision.others else said


def _conclusion(decision: Decision, device: str, is_compared_with_bf16: bool) -> str:
    best, head = decision.best, decision.head
    if best is None:
        return f"No trial has a result that counts: {ends(decision.bad)}."
    speed = f"{_speed(best)} tokens/s per {device}"
    others = decision.others
    if decision.equals:
        tied = [best, *decision.equals]
        names, speeds = (listed([words(row) for row in tied]) for words in (_name, _speed))
        beside = _beside_the_reference(tied, decision)
        return f"{names} are equal within {decision.equal_within}, at {speeds} tokens/s per {device}{beside}."
    if not others and is_compared_with_bf16:
        return f"{_name(best)} is the only trial of this workload with a result: {speed}."
    if not others:
        return f"{_name(best)} is the only trial with a result: {speed}. There was nothing to compare it with."
    if best.trial == best.reference:
        second = f"the next, {_name(others[0])}, reached {_ratio(others[0])} {head}"
        return f"{_name(best)} trains fastest: {speed}. No layout beat it; {second}."
    if best.ratio is None:
        missing = "" if is_compared_with_bf16 else f" {_no_reference(best, head)}"
        return f"{_name(best)} trains fastest: {speed}.{missing}"
    reference = decision.reference
    named = f"{reference.trial}: " if reference and reference.trial != head else ""
    measured_by = f" ({named}{_speed(reference)})" if reference else ""
    return f"{_name(best)} trains fastest: {speed}, {_ratio(best)} {head}{measured_by}."


def particulars(decision: Decision, device: str) -> list[str]:
    """Return the caveats of the headline, one sentence each."""
    said = by_place(decision, device)
    if len({row.world_size for row in decision.good}) > 1:
        units = devices_word(device)
        said.insert(0, f"Trials ran on different numbers of {units}, so all figures are per {device}.")
    best, reference = decision.best, decision.reference
    zero3 = next((row for row in decision.good if _is_zero3(row)), None)
    if best and zero3 and reference and zero3 not in (best, reference) and not _is_zero3(best):
        times = best.speed / zero3.speed
        said.append(f"{best.trial} reaches {times:.2f} × the speed of the fastest ZeRO-3 trial, {zero3.trial}.")
    if best and decision.others and (ratio := decision.speeds.ratio(best, decision.others[0])):
        said.append(
            f"The speed of {best.trial} is {ratio.low:.3f} to {ratio.high:.3f} × that of {decision.others[0].trial} "
            f"({CONFIDENCE} interval over {ratio.num_pairs} runs)."
        )
    if best and decision.bad:
        said.append(f"Not ranked: {ends(decision.bad)}.")
    if best and not decision.others and best.num_runs == 1:
        said.append("It ran once, so the difference between runs is unknown.")
    if any(row.is_emulated for row in decision.good):
        said.append(
            "The hosts are emulated: one machine was divided into hosts that communicate over sockets, so bandwidths "
            "between hosts are not those of a real network."
        )
    return said


def by_place(decision: Decision, device: str) -> list[str]:
    """Return one sentence about the fastest trial for each number of devices and hosts, if trials differ in them.

    Trials on more devices or hosts, or over a slower network, lose more time to communication. Emulated hosts without a
    limited network come after those with one.
    """
    places: dict[tuple[int, int, bool, float, int], list[Row]] = {}
    for row in decision.good:
        network = (row.emulated_gb_per_s or inf, row.emulated_latency_us)
        place = (row.world_size, row.num_hosts or 1, row.is_emulated, *network)
        places.setdefault(place, []).append(row)
    sizes = {size for size, *_ in places}
    if len(places) < 2:
        return []
    said = []
    for (size, count, is_emulated, gb_per_s, latency_us), rows in sorted(places.items()):
        hosts = f"{count}{' emulated' * is_emulated} host{'s' * (count > 1)}"
        limit = f" at {gb_per_s:g} GB/s" * (gb_per_s < inf) + f" and {latency_us} µs" * (latency_us > 0)
        on_hosts = f" of {hosts}{limit}" * (len(places) > len(sizes))
        fastest = _fastest(rows, decision, "there" if on_hosts else "on as many")
        said.append(f"On {size} {device if size == 1 else devices_word(device)}{on_hosts}, {fastest}.")
    return said


def _fastest(rows: Sequence[Row], decision: Decision, place: str) -> str:
    """Return the fastest row for a number of devices and hosts, and its advantage over the fastest ZeRO-3 there."""
    here = decide(rows, decision.speeds, decision.head)
    best = [rows[0], *here.equals]
    if len(best) > 1:
        return f"{listed([row.trial for row in best])} are equal within {here.equal_within}"
    zero3 = next((row for row in rows if _is_zero3(row)), None)
    said = f"{rows[0].trial} {'is fastest' if len(rows) > 1 else 'is the only trial'}"
    if zero3 is None or zero3 is rows[0]:
        return said
    return f"{said}, {rows[0].speed / zero3.speed:.2f} × ZeRO-3 {place} ({zero3.trial})"


def ends(rows: Sequence[Row]) -> str:
    """Return a summary of failures such as "tp8 ran out of memory, a and b failed"."""
    by_status: dict[str, list[str]] = {}
    for row in rows:
        by_status.setdefault(row.status, []).append(row.trial)
    ends = [f"{listed(names)} {STATUS_WORDS[status]}" for status, names in by_status.items()]
    return ", ".join(ends) or "no trial has run"


def _beside_the_reference(tied: Sequence[Row], decision: Decision) -> str:
    if tied[0].ratio is None:
        return ""
    if decision.reference in tied:
        return f": none of them is known to beat {decision.head}"
    return f", {listed([_ratio(row) for row in tied])} {decision.head}"


def _no_reference(best: Row, head: str) -> str:
    name = head if head == best.reference else f"{head} ({best.reference})"
    return f"The reference {name} has no result here to compare with."


def count_ends(rows: Sequence[Row]) -> str:
    """Return the number of trials by status, such as "4 ok, 1 ran out of memory"."""
    counts = Counter(row.status for row in rows)
    return ", ".join(f"{counts[status]} {words}" for status, words in STATUS_WORDS.items() if counts[status])


def _is_zero3(row: Row) -> bool:
    return row.zero_stage == 3


def _name(row: Row) -> str:
    """Return the trial's name, with its layout and engine unless the name contains them."""
    return f"{row.trial} (ZeRO-3)" if _is_zero3(row) else row.trial


def _speed(row: Row) -> str:
    return f"{row.speed:,.0f}"


def _ratio(row: Row) -> str:
    return "–" if row.ratio is None else f"{row.ratio:.2f} ×"


def listed(words: Sequence[str]) -> str:
    """One, two and three."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
