"""Learning-rate schedules: linear warm-up, the decay to min_lr, and their settings."""

from typing import Any

import pytest

from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.optim.schedules import SCHEDULES, learning_rate

WORK: dict[str, Any] = {"model": "llama-tiny", "lr": 1.0}


def resolve(**fields: Any) -> ResolvedConfig:
    return RunConfig.parse(WORK | fields).resolve(1, "cpu")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_peak_and_end(schedule: str) -> None:
    end = {} if schedule == "constant" else {"min_lr": 0.1}
    run = resolve(steps=100, lr_warmup=10, schedule=schedule, **end)
    rates = [learning_rate(run, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_half_way_the_rate_is_half_way(schedule: str) -> None:
    run = resolve(steps=100, lr_warmup=10, min_lr=0.1, schedule=schedule)
    assert (learning_rate(run, 54) + learning_rate(run, 55)) / 2 == pytest.approx(0.55, abs=0.01)


def test_linear_is_a_line_and_cosine_is_not() -> None:
    rates = {
        name: learning_rate(resolve(steps=101, lr_warmup=0, min_lr=0.0, schedule=name), 25)
        for name in ("linear", "cosine")
    }
    assert rates["linear"] == pytest.approx(0.75)
    assert rates["cosine"] == pytest.approx((1 + 0.5**0.5) / 2)


def test_wsd_decays_in_the_last_steps_only() -> None:
    run = resolve(steps=100, lr_warmup=10, min_lr=0.0, schedule="wsd", decay_steps=20)
    rates = [learning_rate(run, step) for step in range(100)]
    assert rates[10:80] == [1.0] * 70
    assert rates[80:] == pytest.approx([1 - number / 20 for number in range(1, 21)])
    assert resolve(steps=100, schedule="wsd").decay_steps == 10


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2])
def test_shortest_runs(steps: int, schedule: str) -> None:
    run = resolve(steps=steps, lr_warmup=0, schedule=schedule)
    assert learning_rate(run, 0) == (run.min_lr if (steps, schedule) == (1, "wsd") else 1.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "step"}, f"schedule='step' is not known; use one of {', '.join(SCHEDULES)}"),
        ({"schedule": "constant", "min_lr": 0.1}, "schedule=constant keeps lr to the end; omit min_lr=0.1"),
        ({"decay_steps": 5}, "decay_steps=5 works only with schedule=wsd, not cosine; omit it"),
        ({"schedule": "wsd", "decay_steps": 95, "lr_warmup": 10}, "are more than steps=100 together"),
        ({"schedule": "wsd", "min_lr": 2.0}, "min_lr=2 is above lr=1"),
    ],
)
def test_settings_without_an_effect_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(steps=100, **fields)
    assert words in str(error.value)
