"""Intervals over repeated runs: known values, and the share of studies in which they contain the true ratio."""

import math
import random

import pytest

from megabench.study.intervals import paired_ratio, t_quantile


@pytest.mark.parametrize(
    ("degrees_of_freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042), (31, 2.0395), (60, 2.0003), (999, 1.9623)],
)
def test_quantiles_of_t(degrees_of_freedom, quantile):
    """The last three are not in the table of the module."""
    assert t_quantile(degrees_of_freedom) == pytest.approx(quantile, abs=1e-4)


def test_a_known_interval():
    """Ratios of 1.01, 1.02 and 1.03: mean logarithm 0.019770, standard deviation 0.0098047, times 4.303 ÷ √3."""
    found = paired_ratio({0: 1010, 1: 1020, 2: 1030}, {0: 1000, 1: 1000, 2: 1000})
    assert found and found.num_pairs == 3
    assert found.low == pytest.approx(math.exp(0.019770 - 0.024358), abs=2e-6)
    assert found.high == pytest.approx(math.exp(0.019770 + 0.024358), abs=2e-6)
    assert found.half_width == pytest.approx(math.exp(0.024358) - 1, abs=2e-6)
    assert found.furthest == pytest.approx(found.high - 1)


def test_runs_of_a_round_are_compared_with_each_other():
    """The machine is 10% slower in every round, and one trial is always 2% faster."""
    slow, fast = {0: 1000.0, 1: 900.0, 2: 810.0}, {0: 1020.0, 1: 918.0, 2: 826.2}
    found = paired_ratio(fast, slow)
    assert (found.low, found.high) == (pytest.approx(1.02), pytest.approx(1.02))
    apart = paired_ratio({0: 918.0, 1: 826.2, 2: 1020.0}, slow)
    assert apart.low < 0.8 and apart.high > 1.2


def test_only_common_rounds_count_and_three_are_needed():
    assert paired_ratio({0: 1.0, 2: 1.1, 3: 1.0, 5: 1.0}, {0: 1.0, 2: 1.0, 3: 9.0, 4: 1.0}).num_pairs == 3
    assert paired_ratio({0: 1.0, 1: 1.1, 3: 1.0}, {0: 1.0, 1: 1.1, 2: 1.0}) is None
    assert paired_ratio({}, {}) is None


@pytest.mark.parametrize("num_runs", [3, 4, 5])
def test_the_interval_contains_the_true_ratio_in_95_of_100_studies(num_runs):
    """Runs differ by 1%, and the machine by another 5% between rounds."""
    chance, true, num_studies = random.Random(num_runs), 1.013, 20_000
    hits = 0
    for _ in range(num_studies):
        drift = [math.exp(chance.gauss(0, 0.05)) for _ in range(num_runs)]
        ours = {n: 1000 * true * drift[n] * math.exp(chance.gauss(0, 0.01)) for n in range(num_runs)}
        others = {n: 1000 * drift[n] * math.exp(chance.gauss(0, 0.01)) for n in range(num_runs)}
        found = paired_ratio(ours, others)
        hits += found.low <= true <= found.high
    assert hits / num_studies == pytest.approx(0.95, abs=0.005)
