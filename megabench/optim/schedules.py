"""Learning-rate schedules by name. Add one function and one line here for a new schedule. Loads no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import Protocol


class ScheduleSettings(Protocol):
    """The settings of a run that its learning rate depends on."""

    @property
    def schedule(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def lr_warmup(self) -> int: ...
    @property
    def decay_steps(self) -> int | None: ...
    @property
    def steps(self) -> int: ...


def _cosine(step: int, num_steps: int, decay_steps: int) -> float:
    return (1 + cos(pi * step / max(1, num_steps - 1))) / 2


def _linear(step: int, num_steps: int, decay_steps: int) -> float:
    return 1 - step / max(1, num_steps - 1)


def _constant(step: int, num_steps: int, decay_steps: int) -> float:
    return 1.0


def _warmup_stable_decay(step: int, num_steps: int, decay_steps: int) -> float:
    """Stay at the peak, and decay linearly in the last `decay_steps` steps (arXiv 2404.06395, section 4)."""
    return min(1.0, (num_steps - 1 - step) / decay_steps)


@dataclass(frozen=True)
class Schedule:
    """A schedule after warm-up.

    `share` returns where the learning rate is between min_lr (0) and lr (1). Its arguments are a step after warm-up,
    counted from 0, the number of these steps, and the number of steps with decay. A schedule that decays uses the
    setting min_lr, and one that `has_decay_steps` the setting decay_steps.
    """

    share: Callable[[int, int, int], float]
    decays: bool = True
    has_decay_steps: bool = False


SCHEDULES = {
    "cosine": Schedule(_cosine),
    "linear": Schedule(_linear),
    "constant": Schedule(_constant, decays=False),
    "wsd": Schedule(_warmup_stable_decay, has_decay_steps=True),
}


def learning_rate(run: ScheduleSettings, step: int) -> float:
    """Return the learning rate of step `step`, counted from 0: linear warm-up to lr, then the schedule to min_lr."""
    if step < run.lr_warmup:
        return run.lr * (step + 1) / run.lr_warmup
    share = SCHEDULES[run.schedule].share(step - run.lr_warmup, run.steps - run.lr_warmup, run.decay_steps or 0)
    return run.min_lr + (run.lr - run.min_lr) * share
