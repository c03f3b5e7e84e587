"""Scores of predictions: error, rank correlation, regret, precision and recall. This module does not import torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """Relative errors of predicted step times, and their rank correlation with measured step times."""

    count: int
    mape: float
    median: float
    spearman: float | None


def accuracy(predicted: Sequence[float], measured: Sequence[float]) -> Accuracy:
    errors = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
    return Accuracy(len(errors), statistics.mean(errors), statistics.median(errors), spearman(predicted, measured))


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, with tied values at their mean rank.

    Return None for fewer than three pairs, or if all values of `a` or all values of `b` are equal.
    """
    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: index for index, value in reversed(list(enumerate(ordered)))}
    counts: dict[float, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return [first[value] + (counts[value] - 1) / 2 for value in values]


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return measured step time of the predicted best ÷ measured step time of the measured best − 1.

    If several predictions tie for the best, return the mean regret of the tied predictions.
    """
    best = min(predicted)
    chosen = [taken for said, taken in zip(predicted, measured, strict=True) if said <= best * (1 + 1e-9)]
    return statistics.mean(chosen) / min(measured) - 1


def is_in_first_two(predicted: Sequence[float], measured: Sequence[float]) -> bool:
    """Return whether the measured best is one of the two predicted best."""
    best = measured.index(min(measured))
    return sum(said < predicted[best] for said in predicted) < 2


@dataclass(frozen=True)
class Alarm:
    """Precision and recall of predicted OOM failures. Undefined values are None. `count` is the number of failures."""

    precision: float | None
    recall: float | None
    count: int


def alarm(said: Sequence[bool], happened: Sequence[bool]) -> Alarm:
    both = sum(a and b for a, b in zip(said, happened, strict=True))
    precision = both / sum(said) if any(said) else None
    return Alarm(precision, both / sum(happened) if any(happened) else None, sum(happened))
