"""The learning rate: linear warm-up, cosine decay, and its two ends."""

import pytest

from megabench.config import RunConfig
from megabench.train.trainer import learning_rate_at

WORK = {"model": "llama-tiny", "lr": 1.0}


def test_warm_up_peak_and_end() -> None:
    run = RunConfig.parse(WORK | {"steps": 100, "lr_warmup": 10, "min_lr": 0.1}).resolve(1, "cpu")
    rates = [learning_rate_at(run, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (rates[54] + rates[55]) / 2 == pytest.approx(0.55, abs=0.01)


@pytest.mark.parametrize("steps", [1, 2])
def test_shortest_runs(steps: int) -> None:
    run = RunConfig.parse(WORK | {"steps": steps, "lr_warmup": 0}).resolve(1, "cpu")
    assert learning_rate_at(run, 0) == 1.0
