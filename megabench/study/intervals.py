"""Confidence intervals over repeated runs. The definitions are in docs/definitions.md."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = "95%"
FEWEST_RUNS = 3  # runs that two trials need each for an interval of their ratio
# Two-sided 95% quantiles of Student's t distribution for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook of
# Statistical Methods, section 1.3.6.7.2). Python's statistics module has only the normal distribution.
_T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class RatioInterval:
    """The 95% confidence interval of the ratio of two speeds, over `num_pairs` pairs of runs."""

    low: float
    high: float
    num_pairs: int

    @property
    def half_width(self) -> float:
        """Half of the width relative to the ratio: 0.01 if the ratio is known to ±1%."""
        return math.sqrt(self.high / self.low) - 1

    @property
    def furthest(self) -> float:
        """The largest relative difference of the speeds inside the interval."""
        return max(self.high - 1, 1 - self.low)


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the two-sided 95% quantile of Student's t distribution.

    Beyond the table, the first terms of the Cornish-Fisher expansion are exact to four digits (Abramowitz and Stegun,
    26.7.5).
    """
    if degrees_of_freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees_of_freedom - 1]
    z, n = statistics.NormalDist().inv_cdf(0.975), degrees_of_freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def paired_ratio(speeds: Mapping[int, float], others: Mapping[int, float]) -> RatioInterval | None:
    """Return the confidence interval of the speed ratio `speeds` ÷ `others`.

    Both arguments map the number of a round to the speed of the run in this round. The runs of a round are compared
    with each other, because what slows the machine for a while slows all runs of the round. The interval is the
    t-interval of the mean logarithm of the ratios of the rounds that both have. With fewer than three such rounds,
    return None: the interval of two rounds is 13 times as wide as their difference.
    """
    logs = [math.log(speeds[number] / others[number]) for number in sorted(set(speeds) & set(others))]
    if len(logs) < FEWEST_RUNS:
        return None
    low, high = _mean_interval(logs)
    return RatioInterval(math.exp(low), math.exp(high), len(logs))


def _mean_interval(values: Sequence[float]) -> tuple[float, float]:
    mean = statistics.fmean(values)
    margin = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - margin, mean + margin
