"""The interface between a training program and the Trainer that measures it."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from megabench.config import ResolvedConfig
from megabench.data.source import TokenSource
from megabench.engines.base import InTraining, StepResult
from megabench.optim.optimizers import StateKind
from megabench.optim.schedules import learning_rate

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


class Follower(Protocol):
    """What a program calls from its own training loop. Every rank calls the methods in the same order."""

    def ready(self) -> None:
        """The program has built its model and its optimizer, and has trained nothing yet."""

    def begin_step(self) -> None:
        """An optimizer step begins."""

    def before_update(self) -> None:
        """The gradients of the step are complete. A program may have updated the weights already (DeepSpeed)."""

    def end_step(self, result: StepResult, learning_rate: float) -> bool:
        """The step has ended. Return whether the program must stop."""
        ...


class Program(InTraining):
    """A training program with its own loop, kernels, optimizer and parallelism.

    The program starts from the initial weights of the run, and reads its sequences through its own extension points.
    Nothing else in it is replaced.
    """

    @property
    def num_steps(self) -> int:
        """The steps of the run, and one more that is profiled if the run asks for it."""
        return self.run.steps + self.run.profile

    @property
    @abstractmethod
    def torch_groups(self) -> Sequence[dict[str, Any]]:
        """The parameter groups of the program's optimizers, with their values at this moment."""

    @property
    def optimizer_groups(self) -> list[Mapping[str, Any]]:
        return [group | {"lr": rate} for group, rate in zip(self.torch_groups, self._rates, strict=True)]

    def begin_step(self) -> None:
        """Read the learning rates of the step that begins. DeepSpeed and schedules change them before it ends."""
        self._next_rates = [group["lr"] for group in self.torch_groups]

    def begin_update(self) -> float:
        """Make the rates of this step those of `optimizer_groups`, and return the first of them."""
        self._rates = self._next_rates
        return self._rates[0]

    @abstractmethod
    def train(self, source: TokenSource, follower: Follower) -> None:
        """Run the program's loop for `num_steps` steps, and tell `follower` about each of them. Collective."""


def plain_name(name: str) -> str:
    """Return the name of a parameter without the wrappers of recomputation and of torch.compile."""
    return _WRAPPERS.sub("", name)


def tensors_of(parameter: nn.Parameter, optimizer: Any) -> dict[StateKind, Tensor]:
    """Return a parameter and its tensors in torch's AdamW, by kind."""
    state = {kind: values for kind, values in optimizer.state[parameter].items() if kind != "step"}
    return {"weight": parameter, **state}


def rate_factor(run: ResolvedConfig, step: int) -> float:
    """Return the learning rate of step `step`, counted from 0, relative to `lr`. A profiled step has the last one."""
    return learning_rate(run, min(step, run.steps - 1)) / run.lr
