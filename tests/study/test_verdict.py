"""When a ranking is confirmed, and what its headline says."""

import math
import random
import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megabench.study.parity import judge_parity
from megabench.study.summary import summarize
from megabench.study.verdict import Speeds, decide, headline, speeds_by_trial, undecided
from tests.study.records import make_record


def decision(**trials: Sequence[float]):
    """The decision about trials with these speeds, one for each round."""
    runs = [
        make_record([6.0], speed, trial=name, repeat=number)
        for name, speeds in trials.items()
        for number, speed in enumerate(speeds)
    ]
    records = judge_parity(runs, next(iter(trials)))
    return decide(summarize(records, next(iter(trials))), speeds_by_trial(records), next(iter(trials)))


FASTER = [1100, 1110, 1105]


@pytest.mark.parametrize(
    ("trials", "equals", "undecided", "words"),
    [
        pytest.param(
            {"a": [1000, 1010, 1005], "b": FASTER}, [], [], "Confirmed by 3 runs of each trial.", id="three runs"
        ),
        pytest.param(
            {"a": [1000, 1010, 1005], "b": [*FASTER, 1100, 1120]},
            [],
            [],
            "Confirmed by 3 to 5 runs of each trial.",
            id="numbers of runs",
        ),
        pytest.param({"a": [1000], "b": [1100]}, [], ["b", "a"], "Not confirmed: each trial ran once.", id="one run"),
        pytest.param(
            {"a": [1000, 1010], "b": [1100, 1111]},
            [],
            ["b", "a"],
            "Not confirmed: no trial ran 3 times.",
            id="two clear runs are too few",
        ),
        pytest.param(
            {"a": [1000], "b": FASTER}, [], ["b", "a"], "Not confirmed: a ran fewer than 3 times.", id="one trial"
        ),
        pytest.param(
            {"a": [1000, 1010, 1005], "b": FASTER, "c": [1090, 1110, 1090]},
            ["c"],
            ["b", "c"],
            "Not confirmed after 3 runs of each trial: the speeds of b and c may differ by up to 2.5%.",
            id="the second may be as fast",
        ),
        pytest.param(
            {"a": [1000, 1010, 1005], "b": FASTER, "c": [1099, 1110, 1105]},
            ["c"],
            [],
            "Confirmed by 3 runs of each trial.",
            id="known to be equal",
        ),
    ],
)
def test_what_confirms_a_ranking(trials, equals, undecided, words):
    found = decision(**trials)
    assert [row.trial for row in found.equals] == equals
    assert [row.trial for row in found.undecided] == undecided
    assert headline(found, "process").endswith(f" {words}")


def test_a_difference_inside_the_interval_is_called_equal():
    found = decision(a=[1000, 1050, 1010], b=[1020, 1030, 1035])
    assert headline(found, "GPU").startswith(
        "b and a are equal within the 95% interval, at 1,030 and 1,010 tokens/s per GPU: none of them is known to beat"
    )


def test_a_difference_that_every_round_shows_is_not_equal_although_the_ranges_overlap():
    """The machine becomes slower from round to round; the ranges of the runs overlap."""
    found = decision(a=[1000, 950, 900], b=[1020, 969, 918])
    assert found.equals == () and found.speeds.spreads["a"].overlaps(found.speeds.spreads["b"])
    assert headline(found, "GPU").endswith("1.02 × a (950). Confirmed by 3 runs of each trial.")


def test_nothing_is_confirmed_about_a_single_trial():
    assert "onfirmed" not in headline(decision(a=[1000, 1000, 1000]), "GPU")


def test_many_trials_are_counted():
    found = decision(**{f"t{number}": [1000.0 - number] for number in range(6)} | {"best": FASTER})
    assert headline(found, "GPU").endswith("Not confirmed: 6 of 7 trials ran fewer than 3 times.")


@pytest.mark.parametrize(
    ("deviation", "lead", "wrong"),
    [(0.003, 0.0, (0.05, 0.09)), (0.01, 0.0, (0.15, 0.20)), (0.003, 0.01, (0.0, 0.001)), (0.01, 0.01, (0.0, 0.006))],
)
def test_how_often_repeated_looks_confirm_what_is_not_so(deviation, lead, wrong):
    """The figures of docs/definitions.md: rounds are added until the ranking is confirmed, as with --confirm.

    One of two trials is faster by `lead`, or none. Runs differ by `deviation`.
    """
    chance, num_studies, num_wrong = random.Random(5), 3000, 0
    for _ in range(num_studies):
        by_round: dict[str, dict[int, float]] = {"slow": {}, "fast": {}}
        for number in range(10):
            for name, log in (("slow", 0.0), ("fast", lead)):
                by_round[name][number] = math.exp(log + chance.gauss(0, deviation))
            medians = {name: statistics.median(speeds.values()) for name, speeds in by_round.items()}
            rows: list[Any] = [SimpleNamespace(trial=name) for name in sorted(medians, key=medians.__getitem__)][::-1]
            speeds = Speeds(by_round, {})
            if number >= 2 and not undecided(rows, speeds):
                is_faster = not speeds.may_be_as_fast(rows[1], rows[0])
                num_wrong += is_faster and (lead == 0 or rows[0].trial == "slow")
                break
    assert wrong[0] <= num_wrong / num_studies <= wrong[1]
