"""`megabench plan --explain`: print the parts of one layout's step and memory as bars. Loads no torch."""

import re
from dataclasses import fields

from rich.console import Console
from rich.text import Text

from megabench.config import ConfigError, near_matches
from megabench.cost.job import Candidate
from megabench.metrics import token_words
from megabench.planner.costs import Estimate
from megabench.planner.layout_table import Training
from megabench.planner.reasons import GIB, chance_text
from megabench.planner.search import Plan, candidates

_BAR = 48  # number of characters of the longest bar


def explain(console: Console, plan: Plan, trial: str, training: Training | None = None) -> None:
    """Print the time of each part of a trial's step as bars, and the days and the price of a whole training.

    Raises ConfigError if the trial is not a candidate.
    """
    estimate = estimate_of(plan, trial)
    chance = f"; its chance to fit is {chance_text(estimate)}" if chance_text(estimate) else ""
    lacks = f"; lacks {estimate.missing_bytes / GIB:.1f} GiB per GPU" if not estimate.fits else ""
    title = f"{estimate.candidate.name}: {estimate.step_seconds:.3f} s a step{lacks}{chance}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    _bars(console, estimate.parts, "s")
    console.print(Text(f"memory of the fullest GPU: {estimate.memory.total / GIB:.1f} GiB", style="bold"))
    memory = {field.name: getattr(estimate.memory, field.name) / GIB for field in fields(estimate.memory)}
    _bars(console, memory, "GiB")
    if training:
        speed = estimate.tokens_per_second
        price = training.price(speed, plan.topology.world_size)
        costs = f" and costs {price:,.0f}" if price is not None else ""
        text = f"Training on {token_words(training.num_tokens)} takes {training.days(speed):,.1f} days{costs}."
        console.print(Text(text), soft_wrap=True)


def _bars(console: Console, parts: dict[str, float], unit: str) -> None:
    total, longest = sum(parts.values()), max(parts.values())
    for name, value in parts.items():
        if value > total / 1e4:
            bar = "█" * max(1, round(_BAR * value / longest))
            console.print(Text(f"{name:>11} {value:9.3f} {unit} {100 * value / total:5.1f}%  {bar}"), soft_wrap=True)


def estimate_of(plan: Plan, trial: str) -> Estimate:
    """Return the estimate of the trial with this name. Raises ConfigError if the trial is not a candidate."""
    return plan.costs.estimate(find_trial(plan, trial))


def find_trial(plan: Plan, trial: str) -> Candidate:
    """Return the candidate with this name. The words of the name may be separated by any characters.

    Raises ConfigError if there is no such candidate.
    """
    by_key = {_key(candidate.name): candidate for candidate in candidates(plan.job, plan.topology)}
    if _key(trial) in by_key:
        return by_key[_key(trial)]
    names = [candidate.name for candidate in by_key.values()]
    shown = [estimate.candidate.name for estimate in plan.ranked + plan.baselines]
    near = near_matches(trial, names, otherwise=f"e.g. {', '.join(shown[:3])}")
    raise ConfigError(f"trial {trial!r} is not a predicted trial; {near}")


def _key(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name.lower()).strip()
