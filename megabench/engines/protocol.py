"""What every engine offers to the training loop."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from megabench import UserError
from megabench.checkpoint.shards import TrainingState
from megabench.config import ResolvedConfig
from megabench.data.batch import Batch
from megabench.record import KernelTraits

TensorKind = Literal["weights", "gradients"]


class DataParallelEngine:
    """What engines have in common that use all ranks as replicas or shards."""

    @staticmethod
    def process_groups(config: ResolvedConfig) -> dict[str, dist.ProcessGroup]:
        world = dist.group.WORLD
        assert world is not None, "the default process group is initialized"
        return {"dp": world}


class EngineError(UserError):
    """Something that an engine needs and this machine has not."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step; the same on every rank.

    `loss` is the mean over the tokens of the global batch, in nats; `grad_norm` the L2 norm of its gradient before
    clipping (not finite when the step was skipped); `num_tokens` the labels of the global batch; `skipped` tells that
    the gradients were not finite and the weights were left alone.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    skipped: bool


class Engine(Protocol):
    """A model on its ranks, with its optimizer. All methods are collective: every rank calls them alike.

    A data-parallel engine inherits from `DataParallelEngine`, which has its process groups.
    """

    @staticmethod
    def process_groups(config: ResolvedConfig) -> dict[str, dist.ProcessGroup]:
        """The groups that the engine of `config` will use on this rank, by axis."""
        ...

    def train_step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """One optimizer step on the micro-batches of this data-parallel rank: `accumulate`, then `update`."""
        ...

    def accumulate(self, batches: Sequence[Batch]) -> None:
        """Forward and backward of one global batch; leaves the reduced gradients in place."""
        ...

    def update(self, learning_rate: float) -> StepResult:
        """Clips the accumulated gradients and steps the optimizer."""
        ...

    def full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its Hugging Face name, whole, as fp32 on CPU; the same on every rank.

        "gradients" are those of the mean loss over the global batch, before clipping; they exist between
        `accumulate` and `update`. Every rank must take the iterator to its end.
        """
        ...

    def training_state(self) -> TrainingState:
        """This rank's part of all that training needs to go on, between two steps.

        The tensors are the engine's own: who writes into them calls `restored` behind it. Not collective.
        """
        ...

    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        """Goes on from the state that was written into the tensors of `training_state`."""
        ...

    @property
    def rank_loss(self) -> float:
        """The mean loss over this rank's own tokens in the last step; 0 where the rank computes no loss."""
        ...

    @property
    def kernels(self) -> dict[str, str]:
        """Which implementation serves each operation, for the record."""
        ...

    @property
    def kernel_traits(self) -> KernelTraits:
        """The traits of the kernels in use, for the record."""
        ...
