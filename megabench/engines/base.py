"""The interface between engines and the training loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megabench.checkpoint.shards import StateShard, TrainingState
from megabench.config import ResolvedConfig
from megabench.data.batch import Batch
from megabench.errors import UserError
from megabench.record import KernelTraits

TensorKind = Literal["weights", "gradients"]


class EngineError(UserError):
    """Raised if this machine lacks a component that the engine needs."""


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step, equal on all ranks.

    `loss` is the mean loss over the tokens of the global batch, in nats; `grad_norm` is the L2 norm of the gradient
    before clipping, which is not finite if the step was skipped; `num_tokens` is the number of labels of the global
    batch; `skipped` is true if the gradients were not finite and the weights were not updated.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    skipped: bool


class InTraining(ABC):
    """This rank's part of a model and its optimizer, which an engine or a program trains.

    All methods except `training_state` are collective: every rank must call them in the same order. The properties are
    not collective.
    """

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        self.run, self.device = config, device

    @staticmethod
    def process_groups(config: ResolvedConfig) -> dict[str, dist.ProcessGroup]:
        """Return the process groups of the engine on this rank, by parallel axis.

        By default, one data-parallel group contains all ranks.
        """
        world = dist.group.WORLD
        assert world is not None, "the default process group is initialized"
        return {"dp": world}

    @abstractmethod
    def training_state(self) -> TrainingState:
        """Return this rank's part of the training state, between two steps.

        The tensors belong to the engine, whose `restored` must be called after writing into them.
        """

    def compute_weights(self) -> list[StateShard]:
        """Return the weights that the last forward pass used on this rank, between `accumulate` and `update`.

        The list contains all copies that the rank holds. It is empty if the engine casts the master weights in each
        forward pass.
        """
        return []

    @property
    @abstractmethod
    def optimizer_groups(self) -> Sequence[Mapping[str, Any]]:
        """The parameter groups that torch's optimizer of this rank uses, with the values of the last step."""

    @property
    @abstractmethod
    def rank_loss(self) -> float:
        """The mean loss over this rank's tokens in the last step, or 0 if the rank computes no loss."""

    @property
    @abstractmethod
    def kernels(self) -> dict[str, str]:
        """The implementation of each operation, for the record."""

    @property
    @abstractmethod
    def kernel_traits(self) -> KernelTraits:
        """The traits of the kernels in use, for the record."""

    @property
    def warnings(self) -> Sequence[str]:
        """What the record should say about the run."""
        return ()

    def step_result(self, loss: float, grad_norm: float, skipped: bool) -> StepResult:
        """Return the result of a step on the global batch of the run."""
        return StepResult(
            loss=loss,
            grad_norm=float("inf") if skipped else grad_norm,
            num_tokens=self.run.global_batch * self.run.seq_length,
            skipped=skipped,
        )


class Engine(InTraining):
    """Holds this rank's part of a model and its optimizer. Every engine inherits from this class."""

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Run an optimizer step on the micro-batches of this data-parallel rank: `accumulate`, then `update`.

        `before_update` is called between the two.
        """
        self.accumulate(batches)
        before_update()
        return self.update(learning_rate)

    @abstractmethod
    def accumulate(self, batches: Sequence[Batch]) -> None:
        """Run forward and backward of one global batch, and keep the reduced gradients."""

    @abstractmethod
    def update(self, learning_rate: float) -> StepResult:
        """Clip the accumulated gradients and step the optimizer."""

    @abstractmethod
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Return the mean loss over the tokens of the given micro-batches of all ranks, in nats, equal on all ranks.

        Each data-parallel rank passes its own micro-batches, all ranks the same number, with the shape of those in
        training. The forward passes use the current weights, without dropout. The next training step is the same, to
        the last bit, as without the call. Do not call `evaluate` between `accumulate` and `update`, and do not use the
        engine after an error of `evaluate`.

        Raises:
            ValueError: The pipeline schedule does not support this number of micro-batches.
        """

    @abstractmethod
    def full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole parameter with its Hugging Face name, as fp32 on CPU. All ranks get the same values.

        "gradients" are the gradients of the mean loss before clipping. They exist between `accumulate` and `update`.
        Every rank must consume the whole iterator.
        """

    @abstractmethod
    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        """Continue from the state that was written into the tensors of `training_state`."""
