"""Score predictions: their errors, and the quality of the choices based on them. Loads no torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """Relative errors of predicted step times, and the rank correlation with the measured ones."""

    count: int
    mape: float
    median: float
    spearman: float | None


def accuracy(predicted: Sequence[float], measured: Sequence[float]) -> Accuracy:
    errors = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
    return Accuracy(len(errors), statistics.mean(errors), statistics.median(errors), spearman(predicted, measured))


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None for fewer than three pairs, or where all are equal."""
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
    """How much longer a step of the predicted best takes than one of the measured best, 0 for the same.

    If several predictions tie for the best, the result is the mean of their regrets.
    """
    best = min(predicted)
    chosen = [taken for said, taken in zip(predicted, measured, strict=True) if said <= best * (1 + 1e-9)]
    return statistics.mean(chosen) / min(measured) - 1


@dataclass(frozen=True)
class Alarm:
    """Precision and recall of "does not fit"; None where nothing was said, or happened."""

    precision: float | None
    recall: float | None
    count: int


def alarm(said: Sequence[bool], happened: Sequence[bool]) -> Alarm:
    both = sum(a and b for a, b in zip(said, happened, strict=True))
    precision = both / sum(said) if any(said) else None
    return Alarm(precision, both / sum(happened) if any(happened) else None, sum(happened))
