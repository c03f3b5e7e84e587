"""The interface between a training program and the Trainer that measures it."""

from abc import abstractmethod
from typing import Protocol

from megabench.data.source import TokenSource
from megabench.engines.base import InTraining, StepResult


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

    @abstractmethod
    def train(self, source: TokenSource, follower: Follower) -> None:
        """Run the program's loop for `num_steps` steps, and tell `follower` about each of them. Collective."""
